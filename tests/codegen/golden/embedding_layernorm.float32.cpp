// embedding_layernorm: token rows looked up and LayerNormed in one pass
// Moves 537,034,752 bytes at 16384 x 4096: every input is read once and every output written once.
// Origin: library kernel embedding_layernorm, variant builtin
// Source: https://arxiv.org/abs/1607.06450
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
static constexpr int64_t kParallelFrom = 16384;

// Outputs must not overlap inputs. Sizes and strides count elements.
extern "C" void fa_embedding_layernorm_26c72f(const int64_t *__restrict ids, const float *__restrict table,
        const float *__restrict weight, const float *__restrict bias, float *__restrict out, int64_t rows,
        int64_t cols, int64_t table_step, int64_t out_row_stride, int64_t table_extent,
        int64_t *__restrict wrong, int threads) {
  const float eps = 1e-05f;
  constexpr int64_t kChunk = 256;  // columns summed in fp32 before fp64 takes over
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * cols >= kParallelFrom)
  for (int64_t row = 0; row < rows; ++row) {
    float *out_row = out + row * out_row_stride;
    const int64_t ids_value = ids[row];
    const bool in_bounds = fa_inside(ids_value, table_extent, 1, wrong);
    double row_sum = 0;
    for (int64_t start = 0; start < cols; start += kChunk) {
      const int64_t stop = start + kChunk < cols ? start + kChunk : cols;
      float row_sum_part = 0;
#pragma omp simd reduction(+ : row_sum_part)
      for (int64_t col = start; col < stop; ++col) {
        row_sum_part += in_bounds ? table[ids_value * table_step + col] : 0.0f;
      }
      row_sum += row_sum_part;
    }
    const float mean = static_cast<float>(row_sum) / static_cast<float>(cols);
    double square_sum = 0;
    for (int64_t start = 0; start < cols; start += kChunk) {
      const int64_t stop = start + kChunk < cols ? start + kChunk : cols;
      float square_sum_part = 0;
#pragma omp simd reduction(+ : square_sum_part)
      for (int64_t col = start; col < stop; ++col) {
        const float table_value = in_bounds ? table[ids_value * table_step + col] : 0.0f;
        const float centred = table_value - mean;
        square_sum_part += centred * centred;
      }
      square_sum += square_sum_part;
    }
    const float variance = static_cast<float>(square_sum) / static_cast<float>(cols);
    const float inverse_root = 1.0f / std::sqrt(variance + eps);
#pragma omp simd
    for (int64_t col = 0; col < cols; ++col) {
      const float table_value = in_bounds ? table[ids_value * table_step + col] : 0.0f;
      const float product = (table_value - mean) * inverse_root * weight[col];
      out_row[col] = product + bias[col];
    }
  }
}
