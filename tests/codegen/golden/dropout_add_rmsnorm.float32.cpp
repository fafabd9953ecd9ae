// dropout_add_rmsnorm: dropout, residual add and RMSNorm in one pass; returns the sum and the normed rows
// Moves 134,234,120 bytes at 2048 x 4096: every input is read once and every output written once.
// Drops the elements whose random word (Philox4x32-10 of the seed and the row-major element number) is below
// 429496730, p = 0.1 of 2**32; the others are scaled by 1 / (1 - p).
// Origin: library kernel dropout_add_rmsnorm, variant builtin
// Source: https://doi.org/10.1145/2063384.2063405, https://arxiv.org/abs/1910.07467
// Build: c++ -std=c++17 -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared

#include <cmath>
#include <cstdint>
#include <memory>

// ---- helpers ----

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
extern "C" void fa_dropout_add_rmsnorm_3749a9(const float *__restrict residual, const float *__restrict x,
        const int64_t *__restrict seed, const float *__restrict weight, float *__restrict total,
        float *__restrict out, int64_t rows, int64_t cols, int64_t residual_row_stride, int64_t x_row_stride,
        int64_t total_row_stride, int64_t out_row_stride, int64_t element_row_stride, int threads) {
  const float eps = 1e-06f;
  constexpr int64_t kChunk = 256;  // columns summed in fp32 before fp64 takes over
#pragma omp parallel num_threads(threads) if (rows * cols >= kParallelFrom)
  {
    const std::unique_ptr<float[]> sum_buffer(new float[cols]);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const float *residual_row = residual + row * residual_row_stride;
      const float *x_row = x + row * x_row_stride;
      float *total_row = total + row * total_row_stride;
      float *out_row = out + row * out_row_stride;
      const int64_t seed_value = seed[0];
      double square_sum = 0;
      for (int64_t start = 0; start < cols; start += kChunk) {
        const int64_t stop = start + kChunk < cols ? start + kChunk : cols;
        float square_sum_part = 0;
#pragma omp simd reduction(+ : square_sum_part)
        for (int64_t col = start; col < stop; ++col) {
          const float factor = fa_is_kept(seed_value, row * element_row_stride + col, 429496730u) ? 1.1111111111111112f : 0.0f;
          const float sum = residual_row[col] + x_row[col] * factor;
          sum_buffer[col] = sum;
          total_row[col] = sum;
          square_sum_part += sum * sum;
        }
        square_sum += square_sum_part;
      }
      const float mean_square = static_cast<float>(square_sum) / static_cast<float>(cols);
      const float inverse_root = 1.0f / std::sqrt(mean_square + eps);
#pragma omp simd
      for (int64_t col = 0; col < cols; ++col) {
        out_row[col] = sum_buffer[col] * inverse_root * weight[col];
      }
    }
  }
}
