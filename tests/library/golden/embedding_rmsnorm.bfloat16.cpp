// embedding_rmsnorm: token rows looked up for the residual stream, and RMS-normed for the first block
// Moves 402,792,448 bytes at 16384 x 4096: every input is read once and every output written once.
// Origin: library kernel embedding_rmsnorm, variant llama
// Source: https://arxiv.org/abs/1910.07467
// Build: c++ -std=c++17 -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared

#include <cmath>
#include <cstdint>
#include <cstring>

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

static inline float fa_round_bf16(float x) { return fa_from_bf16(fa_to_bf16(x)); }

// Threads start from this many elements on: below it they cost more than they save.
static constexpr int64_t kParallelFrom = 32768;

// Outputs must not overlap inputs. Sizes and strides count elements.
extern "C" void fa_embedding_rmsnorm_36dcee(const int64_t *__restrict ids, const uint16_t *__restrict table,
        const uint16_t *__restrict weight, uint16_t *__restrict rows, uint16_t *__restrict out,
        int64_t rows_2, int64_t cols, int64_t table_step, int64_t rows_row_stride, int64_t out_row_stride,
        int64_t table_extent, int threads) {
  const float eps = 1e-06f;
  constexpr int64_t kChunk = 1024;  // columns summed in fp32 before fp64 takes over
#pragma omp parallel for schedule(static) num_threads(threads) if (rows_2 * cols >= kParallelFrom)
  for (int64_t row = 0; row < rows_2; ++row) {
    uint16_t *rows_row = rows + row * rows_row_stride;
    uint16_t *out_row = out + row * out_row_stride;
    const int64_t ids_value = ids[row];
    const bool both = (ids_value >= int64_t{0}) & (ids_value < table_extent);
    double square_sum = 0;
    for (int64_t start = 0; start < cols; start += kChunk) {
      const int64_t stop = start + kChunk < cols ? start + kChunk : cols;
      float square_sum_part = 0;
#pragma omp simd reduction(+ : square_sum_part)
      for (int64_t col = start; col < stop; ++col) {
        const float table_value = fa_from_bf16(both ? table[ids_value * table_step + col] : uint16_t{0});
        const float chosen = both ? table_value : NAN;
        rows_row[col] = fa_to_bf16(chosen);
        square_sum_part += chosen * chosen;
      }
      square_sum += square_sum_part;
    }
    const float mean_square = static_cast<float>(square_sum) / static_cast<float>(cols);
    const float inverse_root = 1.0f / std::sqrt(mean_square + eps);
#pragma omp simd
    for (int64_t col = 0; col < cols; ++col) {
      const float table_value = fa_from_bf16(both ? table[ids_value * table_step + col] : uint16_t{0});
      const float rounded = fa_round_bf16((both ? table_value : NAN) * inverse_root);
      out_row[col] = fa_to_bf16(fa_from_bf16(weight[col]) * rounded);
    }
  }
}
