// One pass over memory for one update of many arrays, on CPU.
//
// XLA on CPU writes each result of an update in a loop of its own: 10 words of traffic a
// number for Adam, where 7 do. Here every number is read once and written once. There is
// no fast-math: NaN, infinities and signed zeros come out as they do in XLA.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// The best instruction set of the machine that it runs on is chosen at load time.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define CLONED \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONED
#endif
#define INLINE inline __attribute__((always_inline))

constexpr int64_t kChunk = 1 << 14;  // numbers in a piece of work
constexpr int64_t kAlone = 1 << 15;  // up to so many, waking another thread costs more

// --- Numbers -------------------------------------------------------------------------

struct bf16 {
  uint16_t bits;
};

INLINE float wide(float x) { return x; }
INLINE float wide(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

INLINE void round_to(float x, float& y) { y = x; }
INLINE void round_to(float x, bf16& y) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  uint32_t near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  uint32_t nan = (bits >> 16) | 0x40;
  bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  y.bits = static_cast<uint16_t>(is_nan ? nan : near);
}

// Of 0 and NaN, themselves. On integers: a compiler may take comparisons of floats for
// branches, which it cannot vectorise and no processor can foresee.
INLINE float sign(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  uint32_t size = bits & 0x7fffffff, one = (bits & 0x80000000) | 0x3f800000;
  bool itself = size == 0 || size > 0x7f800000;
  bits = itself ? bits : one;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// --- Rules ---------------------------------------------------------------------------

// A part of one array. Old and new may be the same memory.
struct Piece {
  int64_t size;
  const void* x;
  const void* g;
  const float* kept[2];
  void* new_x;
  float* new_kept[2];
};

// The loops of the rules. `s` are the numbers that all elements share, in the order of
// the rule's `kernel` in Python; `flag` is its option.

template <typename X, typename G>
INLINE void adam(const float* s, bool decays, const Piece& p) {
  const float rate = s[0], b1 = s[1], b2 = s[2], eps = s[3], eps_root = s[4];
  // One division and one root are what the loop can hide behind memory; hence inverses.
  const float rate_m = rate / s[5], inverse_v = 1 / s[6], decay = s[7], scale = s[8];
  const X* x = static_cast<const X*>(p.x);
  const G* g = static_cast<const G*>(p.g);
  const float *m = p.kept[0], *v = p.kept[1];
  X* new_x = static_cast<X*>(p.new_x);
  float *new_m = p.new_kept[0], *new_v = p.new_kept[1];
#pragma GCC ivdep
  for (int64_t i = 0; i < p.size; ++i) {
    float xi = wide(x[i]), gi = scale * wide(g[i]);
    float mi = b1 * m[i] + (1 - b1) * gi;
    float vi = b2 * v[i] + (1 - b2) * (gi * gi);
    float root = std::sqrt(vi * inverse_v + eps_root) + eps;
    float step = rate_m * mi / root;
    if (decays) step += decay * xi;
    new_m[i] = mi;
    new_v[i] = vi;
    round_to(xi - step, new_x[i]);
  }
}

template <typename X, typename G>
INLINE void momentum(const float* s, bool nesterov, const Piece& p) {
  const float rate = s[0], mu = s[1], taken = s[2], decay = s[3], scale = s[4];
  const bool decays = decay != 0;
  const X* x = static_cast<const X*>(p.x);
  const G* g = static_cast<const G*>(p.g);
  const float* v = p.kept[0];
  X* new_x = static_cast<X*>(p.new_x);
  float* new_v = p.new_kept[0];
#pragma GCC ivdep
  for (int64_t i = 0; i < p.size; ++i) {
    float xi = wide(x[i]), gi = scale * wide(g[i]);
    if (decays) gi += decay * xi;
    float vi = mu * v[i] + taken * gi;
    float d = nesterov ? gi + mu * vi : vi;
    new_v[i] = vi;
    round_to(xi - rate * d, new_x[i]);
  }
}

template <typename X, typename G>
INLINE void lion(const float* s, bool decays, const Piece& p) {
  const float rate = s[0], b1 = s[1], b2 = s[2], decay = s[3], scale = s[4];
  const X* x = static_cast<const X*>(p.x);
  const G* g = static_cast<const G*>(p.g);
  const float* m = p.kept[0];
  X* new_x = static_cast<X*>(p.new_x);
  float* new_m = p.new_kept[0];
#pragma GCC ivdep
  for (int64_t i = 0; i < p.size; ++i) {
    float xi = wide(x[i]), gi = scale * wide(g[i]);
    float c = b1 * m[i] + (1 - b1) * gi;
    float step = rate * sign(c);
    if (decays) step += decay * xi;
    new_m[i] = b2 * m[i] + (1 - b2) * gi;
    round_to(xi - step, new_x[i]);
  }
}

using Loop = void (*)(const float*, const Piece&);

#define LOOP(RULE, NAME, X, G, FLAG) \
  CLONED void NAME(const float* s, const Piece& p) { RULE<X, G>(s, FLAG, p); }
#define LOOPS(RULE)                                                   \
  LOOP(RULE, RULE##_ff0, float, float, false)                         \
  LOOP(RULE, RULE##_ff1, float, float, true)                          \
  LOOP(RULE, RULE##_bf0, bf16, float, false)                          \
  LOOP(RULE, RULE##_bf1, bf16, float, true)                           \
  LOOP(RULE, RULE##_bb0, bf16, bf16, false)                           \
  LOOP(RULE, RULE##_bb1, bf16, bf16, true)                            \
  Loop RULE##_loop(bool half_x, bool half_g, bool flag) {             \
    if (!half_x) return flag ? RULE##_ff1 : RULE##_ff0;               \
    if (!half_g) return flag ? RULE##_bf1 : RULE##_bf0;               \
    return flag ? RULE##_bb1 : RULE##_bb0;                            \
  }
LOOPS(adam)
LOOPS(momentum)
LOOPS(lion)

// --- Work ----------------------------------------------------------------------------

// Pieces that the threads take as they come. The caller takes part, so that a pool that
// is busy delays it but cannot block it; a thread that comes late finds nothing to do.
struct Work {
  Loop loop;
  std::vector<float> numbers;
  std::vector<Piece> pieces;
  std::atomic<size_t> next{0}, done{0};
  std::mutex mutex;
  std::condition_variable finished;

  void run() {
    size_t mine = 0;
    for (size_t i; (i = next.fetch_add(1)) < pieces.size(); ++mine)
      loop(numbers.data(), pieces[i]);
    if (mine != 0 && done.fetch_add(mine) + mine == pieces.size()) {
      std::lock_guard<std::mutex> lock(mutex);
      finished.notify_all();
    }
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, [this] { return done.load() == pieces.size(); });
  }
};

// Operands: the numbers; then x, g and each array of state, all slots of one after all
// of the other. Results: x and the state, likewise.
template <Loop (*Choose)(bool, bool, bool), size_t Numbers, size_t Kept>
ffi::Error Update(ffi::ThreadPool pool, bool flag, ffi::RemainingArgs args,
                  ffi::RemainingRets rets) {
  const size_t slots = (args.size() - Numbers) / (2 + Kept);
  if (args.size() != Numbers + slots * (2 + Kept) || rets.size() != slots * (1 + Kept))
    return ffi::Error::InvalidArgument("optimjax: operands do not fit the kernel");
  auto argument = [&](size_t i) { return *args.get<ffi::AnyBuffer>(i); };
  auto result = [&](size_t i) { return **rets.get<ffi::AnyBuffer>(i); };

  auto work = std::make_shared<Work>();
  for (size_t k = 0; k < Numbers; ++k)
    work->numbers.push_back(*static_cast<float*>(argument(k).untyped_data()));
  int64_t total = 0;
  bool half_x = false, half_g = false;
  for (size_t j = 0; j < slots; ++j) {
    ffi::AnyBuffer x = argument(Numbers + j), g = argument(Numbers + slots + j);
    half_x = x.element_type() == ffi::DataType::BF16;
    half_g = g.element_type() == ffi::DataType::BF16;
    const int64_t size = x.element_count();
    total += size;
    for (int64_t at = 0; at < size; at += kChunk) {
      auto from = [&](const ffi::AnyBuffer& b, int64_t width) {
        return static_cast<char*>(b.untyped_data()) + at * width;
      };
      Piece piece{std::min(kChunk, size - at), from(x, half_x ? 2 : 4),
                  from(g, half_g ? 2 : 4),     {},
                  from(result(j), half_x ? 2 : 4), {}};
      for (size_t k = 0; k < Kept; ++k) {
        piece.kept[k] = reinterpret_cast<const float*>(
            from(argument(Numbers + (2 + k) * slots + j), 4));
        piece.new_kept[k] =
            reinterpret_cast<float*>(from(result((1 + k) * slots + j), 4));
      }
      work->pieces.push_back(piece);
    }
  }
  work->loop = Choose(half_x, half_g, flag);
  const bool alone = total <= kAlone;
  const int64_t helpers = alone ? 0 : std::min<int64_t>(pool.num_threads(),
                                                        work->pieces.size()) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work->run(); });
  work->run();
  if (helpers > 0) work->wait();
  return ffi::Error::Success();
}

}  // namespace

#define HANDLER(RULE, NUMBERS, KEPT)                                                \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(optimjax_##RULE, (Update<RULE##_loop, NUMBERS, KEPT>), \
                                ffi::Ffi::Bind()                                    \
                                    .Ctx<ffi::ThreadPool>()                         \
                                    .Attr<bool>("flag")                             \
                                    .RemainingArgs()                                \
                                    .RemainingRets())
HANDLER(adam, 9, 2);
HANDLER(momentum, 5, 1);
HANDLER(lion, 5, 1);
