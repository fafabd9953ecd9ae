// rope_interleaved: rotary position embedding over neighbouring pairs: x * cos + rotate_pairs(x) * sin, x read
// where it lies in the projection
// Moves 69,206,016 bytes at 2048 x 32 x 64: every input is read once and every output written once.
// Origin: library kernel rope_interleaved, variant stack
// Source: https://arxiv.org/abs/2104.09864
// Build: c++ -std=c++17 -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared

#include <cmath>
#include <cstdint>

// Threads start from this many elements on: below it they cost more than they save.
static constexpr int64_t kParallelFrom = 16384;

// Outputs must not overlap inputs. Sizes and strides count elements.
extern "C" void fa_rope_interleaved_5c3079(const float *__restrict x, const float *__restrict cos,
        const float *__restrict sin, float *__restrict out, int64_t n0, int64_t n1, int64_t cols,
        int64_t x_i0_stride, int64_t x_i1_stride, int64_t cos_i0_stride, int64_t sin_i0_stride,
        int64_t out_i0_stride, int64_t out_i1_stride, int threads) {
  constexpr int64_t kBlock = 4096;
#pragma omp parallel for collapse(3) schedule(static) num_threads(threads) if (n0 * n1 * cols >= kParallelFrom)
  for (int64_t i0 = 0; i0 < n0; ++i0) {
    for (int64_t i1 = 0; i1 < n1; ++i1) {
      for (int64_t start = 0; start < cols; start += kBlock) {
        const int64_t stop = start + kBlock < cols ? start + kBlock : cols;
        const float *x_row = x + i0 * x_i0_stride + i1 * x_i1_stride;
        const float *cos_row = cos + i0 * cos_i0_stride;
        const float *sin_row = sin + i0 * sin_i0_stride;
        float *out_row = out + i0 * out_i0_stride + i1 * out_i1_stride;
#pragma omp simd
        for (int64_t col = start; col < stop; ++col) {
          const float x_value = x_row[col * 2];
          const float x_value_2 = x_row[col * 2 + 1];
          out_row[col * 2] = x_value * cos_row[col * 2] + -x_value_2 * sin_row[col * 2];
          out_row[col * 2 + 1] = x_value_2 * cos_row[col * 2 + 1] + x_value * sin_row[col * 2 + 1];
        }
      }
    }
  }
}
