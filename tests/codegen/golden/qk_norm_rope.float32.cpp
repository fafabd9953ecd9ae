// qk_norm_rope: per-head RMSNorm and rotary embedding, in one pass, x read where the projection wrote it
// Moves 69,206,528 bytes at 2048 x 32 x 64: every input is read once and every output written once.
// Origin: library kernel qk_norm_rope, variant llama
// Source: https://arxiv.org/abs/2505.09388
// Build: c++ -std=c++17 -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared

#include <cmath>
#include <cstdint>

// Threads start from this many elements on: below it they cost more than they save.
static constexpr int64_t kParallelFrom = 16384;

// Outputs must not overlap inputs. Sizes and strides count elements.
extern "C" void fa_qk_norm_rope_f4e8f7(const float *__restrict weight, const float *__restrict x,
        const float *__restrict cos, const float *__restrict sin, float *__restrict out, int64_t n0,
        int64_t n1, int64_t cols, int64_t weight_1_offset, int64_t x_0_i0_stride, int64_t x_0_i1_stride,
        int64_t x_1_i0_stride, int64_t x_1_i1_stride, int64_t x_1_offset, int64_t cos_0_i0_stride,
        int64_t cos_1_i0_stride, int64_t cos_1_offset, int64_t sin_0_i0_stride, int64_t sin_1_i0_stride,
        int64_t sin_1_offset, int64_t out_0_i0_stride, int64_t out_0_i1_stride, int64_t out_1_i0_stride,
        int64_t out_1_i1_stride, int64_t out_1_offset, int threads) {
  const float eps = 1e-06f;
  constexpr int64_t kChunk = 256;  // columns summed in fp32 before fp64 takes over
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (n0 * n1 * cols >= kParallelFrom)
  for (int64_t i0 = 0; i0 < n0; ++i0) {
    for (int64_t i1 = 0; i1 < n1; ++i1) {
      const float *x_0_row = x + i0 * x_0_i0_stride + i1 * x_0_i1_stride;
      const float *x_1_row = x + x_1_offset + i0 * x_1_i0_stride + i1 * x_1_i1_stride;
      const float *weight_1_row = weight + weight_1_offset;
      const float *cos_0_row = cos + i0 * cos_0_i0_stride;
      const float *cos_1_row = cos + cos_1_offset + i0 * cos_1_i0_stride;
      const float *sin_0_row = sin + i0 * sin_0_i0_stride;
      const float *sin_1_row = sin + sin_1_offset + i0 * sin_1_i0_stride;
      float *out_0_row = out + i0 * out_0_i0_stride + i1 * out_0_i1_stride;
      float *out_1_row = out + out_1_offset + i0 * out_1_i0_stride + i1 * out_1_i1_stride;
      double row_sum = 0;
      for (int64_t start = 0; start < cols; start += kChunk) {
        const int64_t stop = start + kChunk < cols ? start + kChunk : cols;
        float row_sum_part = 0;
#pragma omp simd reduction(+ : row_sum_part)
        for (int64_t col = start; col < stop; ++col) {
          const float x_value = x_0_row[col];
          const float x_value_2 = x_1_row[col];
          row_sum_part += x_value * x_value + x_value_2 * x_value_2;
        }
        row_sum += row_sum_part;
      }
      const float mean = static_cast<float>(row_sum) / (2.0f * static_cast<float>(cols));
      const float inverse_root = 1.0f / std::sqrt(eps + mean);
#pragma omp simd
      for (int64_t col = 0; col < cols; ++col) {
        const float product = weight[col] * (x_0_row[col] * inverse_root);
        const float product_2 = weight_1_row[col] * (x_1_row[col] * inverse_root);
        out_0_row[col] = product * cos_0_row[col] + -product_2 * sin_0_row[col];
        out_1_row[col] = product_2 * cos_1_row[col] + product * sin_1_row[col];
      }
    }
  }
}
