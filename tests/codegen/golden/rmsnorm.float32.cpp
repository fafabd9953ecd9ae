// rmsnorm: x / rms(x) * weight over the last dim, the row read once
// Moves 67,125,248 bytes at 2048 x 4096: every input is read once and every output written once.
// Origin: library kernel rmsnorm, variant llama
// Source: https://arxiv.org/abs/1910.07467
// Build: c++ -std=c++17 -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared

#include <cmath>
#include <cstdint>

// Threads start from this many elements on: below it they cost more than they save.
static constexpr int64_t kParallelFrom = 32768;

// Outputs must not overlap inputs. Sizes and strides count elements.
extern "C" void fa_rmsnorm_63b18a(const float *__restrict weight, const float *__restrict x,
        float *__restrict out, int64_t rows, int64_t cols, int64_t x_row_stride, int64_t out_row_stride,
        int threads) {
  const float eps = 1e-06f;
  constexpr int64_t kChunk = 256;  // columns summed in fp32 before fp64 takes over
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * cols >= kParallelFrom)
  for (int64_t row = 0; row < rows; ++row) {
    const float *x_row = x + row * x_row_stride;
    float *out_row = out + row * out_row_stride;
    double square_sum = 0;
    for (int64_t start = 0; start < cols; start += kChunk) {
      const int64_t stop = start + kChunk < cols ? start + kChunk : cols;
      float square_sum_part = 0;
#pragma omp simd reduction(+ : square_sum_part)
      for (int64_t col = start; col < stop; ++col) {
        const float x_value = x_row[col];
        square_sum_part += x_value * x_value;
      }
      square_sum += square_sum_part;
    }
    const float mean_square = static_cast<float>(square_sum) / static_cast<float>(cols);
    const float inverse_root = 1.0f / std::sqrt(mean_square + eps);
#pragma omp simd
    for (int64_t col = 0; col < cols; ++col) {
      out_row[col] = weight[col] * (x_row[col] * inverse_root);
    }
  }
}
