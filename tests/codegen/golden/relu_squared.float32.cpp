// relu_squared: max(x, 0) squared, in one pass
// Moves 67,108,864 bytes at 8388608: every input is read once and every output written once.
// Origin: library kernel relu_squared, variant square
// Source: https://arxiv.org/abs/2109.08668
// Build: c++ -std=c++17 -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared

#include <cmath>
#include <cstdint>

// ---- helpers ----

// A NaN on either side wins, as in torch.
template <typename T>
static inline T fa_max(T a, T b) {
  return (a > b) | (a != a) ? a : b;
}

// ---- kernel ----

// Threads start from this many elements on: below it they cost more than they save.
static constexpr int64_t kParallelFrom = 32768;

// Outputs must not overlap inputs. Sizes and strides count elements.
extern "C" void fa_relu_squared_4a015e(const float *__restrict x, float *__restrict out, int64_t n,
        int threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads) if (n >= kParallelFrom)
  for (int64_t i = 0; i < n; ++i) {
    const float larger = fa_max(0.0f, x[i]);
    out[i] = larger * larger;
  }
}
