// embedding_scale: token rows looked up and scaled, as Gemma begins
// Moves 402,784,256 bytes at 16384 x 3072: every input is read once and every output written once.
// Origin: library kernel embedding_scale, variant scaled
// Source: https://arxiv.org/abs/2403.08295
// Build: c++ -std=c++17 -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared

#include <cmath>
#include <cstdint>

// ---- helpers ----

// Leave the first position out of range, and the number of the check that it failed, for the caller, who raises torch's error.
__attribute__((noinline, cold)) static void fa_leave(int64_t number, int64_t check, int64_t *wrong) {
  int64_t none = 0;
  if (__atomic_compare_exchange_n(wrong, &none, check, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) wrong[1] = number;
}

// Whether a position lies in its tensor; nothing is read or written where it does not.
static inline bool fa_inside(int64_t number, int64_t extent, int64_t check, int64_t *wrong) {
  const bool is_inside = static_cast<uint64_t>(number) < static_cast<uint64_t>(extent);
  if (__builtin_expect(!is_inside, 0)) fa_leave(number, check, wrong);
  return is_inside;
}

// ---- kernel ----

// Threads start from this many elements on: below it they cost more than they save.
static constexpr int64_t kParallelFrom = 32768;

// Outputs must not overlap inputs. Sizes and strides count elements.
extern "C" void fa_embedding_scale_ba8a01(const int64_t *__restrict ids, const float *__restrict weight,
        float *__restrict out, int64_t rows, int64_t cols, int64_t weight_step, int64_t out_row_stride,
        int64_t weight_extent, int64_t *__restrict wrong, int threads) {
  const float scale = 55.42562584220407f;
  constexpr int64_t kBlock = 4096;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (rows * cols >= kParallelFrom)
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t start = 0; start < cols; start += kBlock) {
      const int64_t stop = start + kBlock < cols ? start + kBlock : cols;
      float *out_row = out + row * out_row_stride;
      const int64_t ids_value = ids[row];
      const bool in_bounds = fa_inside(ids_value, weight_extent, 1, wrong);
#pragma omp simd
      for (int64_t col = start; col < stop; ++col) {
        const float weight_value = in_bounds ? weight[ids_value * weight_step + col] : 0.0f;
        out_row[col] = weight_value * scale;
      }
    }
  }
}
