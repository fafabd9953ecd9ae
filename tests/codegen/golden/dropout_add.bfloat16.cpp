// dropout_add: dropout and residual add in one pass; the same seed drops the same elements
// Moves 50,331,656 bytes at 8388608: every input is read once and every output written once.
// Drops the elements whose random word (Philox4x32-10 of the seed and the row-major element number) is below
// 429496730, p = 0.1 of 2**32; the others are scaled by 1 / (1 - p).
// Origin: library kernel dropout_add, variant seeded
// Source: https://doi.org/10.1145/2063384.2063405
// Build: c++ -std=c++17 -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared

#include <cmath>
#include <cstdint>
#include <cstring>

// ---- helpers ----

static inline uint32_t fa_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline float fa_from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

static inline float fa_from_bf16(uint16_t x) { return fa_from_bits(uint32_t{x} << 16); }

// Round to nearest even; a NaN stays a NaN.
static inline uint16_t fa_to_bf16(float x) {
  const uint32_t bits = fa_bits(x);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>((x != x ? 0x7fc00000u : rounded) >> 16);
}

// Whether dropout keeps an element: its word of Philox4x32-10 (Salmon et al., SC'11) is not below the threshold. Four neighbours
// share a counter, and each makes the call again: so the loop around it vectorises.
static inline bool fa_is_kept(int64_t seed, int64_t element, uint32_t threshold) {
  const uint64_t counter = static_cast<uint64_t>(element) >> 2;
  uint32_t a = static_cast<uint32_t>(counter), b = static_cast<uint32_t>(counter >> 32), c = 0, d = 0;
  uint32_t low_key = static_cast<uint32_t>(seed), high_key = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53u} * a, second = uint64_t{0xCD9E8D57u} * c;
    a = static_cast<uint32_t>(second >> 32) ^ b ^ low_key;
    b = static_cast<uint32_t>(second);
    c = static_cast<uint32_t>(first >> 32) ^ d ^ high_key;
    d = static_cast<uint32_t>(first);
    low_key += 0x9E3779B9u;
    high_key += 0xBB67AE85u;
  }
  const uint32_t low = element & 1 ? b : a, high = element & 1 ? d : c;
  return (element & 2 ? high : low) >= threshold;
}

// ---- kernel ----

// Threads start from this many elements on: below it they cost more than they save.
static constexpr int64_t kParallelFrom = 8192;

// Outputs must not overlap inputs. Sizes and strides count elements.
extern "C" void fa_dropout_add_195b71(const uint16_t *__restrict residual, const uint16_t *__restrict x,
        const int64_t *__restrict seed, uint16_t *__restrict out, int64_t n, int threads) {
  const int64_t seed_value = seed[0];
#pragma omp parallel for simd schedule(static) num_threads(threads) if (n >= kParallelFrom)
  for (int64_t i = 0; i < n; ++i) {
    const float factor = fa_is_kept(seed_value, i, 429496730u) ? 1.1111111111111112f : 0.0f;
    out[i] = fa_to_bf16(fa_from_bf16(residual[i]) + fa_from_bf16(x[i]) * factor);
  }
}
