"""Other libraries: each module here imports one, and is imported only when used."""

__all__ = []
