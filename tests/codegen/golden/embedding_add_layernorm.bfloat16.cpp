// embedding_add_layernorm: word, token type and position rows looked up, added and LayerNormed in one pass
// Moves 198,836,224 bytes at 128 x 512 x 1024: every input is read once and every output written once.
// Origin: library kernel embedding_add_layernorm, variant type_first
// Source: https://arxiv.org/abs/1810.04805
// Build: c++ -std=c++17 -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

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
extern "C" void fa_embedding_add_layernorm_44804d(const int64_t *__restrict ids,
        const uint16_t *__restrict words, const int64_t *__restrict type_ids,
        const uint16_t *__restrict types, const int64_t *__restrict position_ids,
        const uint16_t *__restrict positions, const uint16_t *__restrict weight,
        const uint16_t *__restrict bias, uint16_t *__restrict out, int64_t n0, int64_t n1, int64_t cols,
        int64_t ids_i0_stride, int64_t words_step, int64_t type_ids_i0_stride, int64_t types_step,
        int64_t positions_step, int64_t out_i0_stride, int64_t out_i1_stride, int64_t words_extent,
        int64_t types_extent, int64_t positions_extent, int64_t *__restrict wrong, int threads) {
  const float eps = 1e-12f;
  constexpr int64_t kChunk = 256;  // columns summed in fp32 before fp64 takes over
#pragma omp parallel num_threads(threads) if (n0 * n1 * cols >= kParallelFrom)
  {
    const std::unique_ptr<float[]> sum_buffer(new float[cols]);
    const std::unique_ptr<float[]> centred_buffer(new float[cols]);
#pragma omp for collapse(2) schedule(static)
    for (int64_t i0 = 0; i0 < n0; ++i0) {
      for (int64_t i1 = 0; i1 < n1; ++i1) {
        uint16_t *out_row = out + i0 * out_i0_stride + i1 * out_i1_stride;
        const int64_t ids_value = ids[i0 * ids_i0_stride + i1];
        const bool in_bounds = fa_inside(ids_value, words_extent, 1, wrong);
        const int64_t type_ids_value = type_ids[i0 * type_ids_i0_stride + i1];
        const bool in_bounds_2 = fa_inside(type_ids_value, types_extent, 2, wrong);
        const int64_t position_ids_value = position_ids[i1];
        const bool in_bounds_3 = fa_inside(position_ids_value, positions_extent, 3, wrong);
        double row_sum = 0;
        for (int64_t start = 0; start < cols; start += kChunk) {
          const int64_t stop = start + kChunk < cols ? start + kChunk : cols;
          float row_sum_part = 0;
#pragma omp simd reduction(+ : row_sum_part)
          for (int64_t col = start; col < stop; ++col) {
            const float words_value = fa_from_bf16(in_bounds ? words[ids_value * words_step + col] : uint16_t{0});
            const float types_value = fa_from_bf16(in_bounds_2 ? types[type_ids_value * types_step + col] : uint16_t{0});
            const float positions_value = fa_from_bf16(in_bounds_3 ? positions[position_ids_value * positions_step + col] : uint16_t{0});
            const float sum = words_value + types_value + positions_value;
            sum_buffer[col] = sum;
            row_sum_part += sum;
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
            const float centred = sum_buffer[col] - mean;
            centred_buffer[col] = centred;
            square_sum_part += centred * centred;
          }
          square_sum += square_sum_part;
        }
        const float variance = static_cast<float>(square_sum) / static_cast<float>(cols);
        const float inverse_root = 1.0f / std::sqrt(variance + eps);
#pragma omp simd
        for (int64_t col = 0; col < cols; ++col) {
          const float product = centred_buffer[col] * inverse_root * fa_from_bf16(weight[col]);
          out_row[col] = fa_to_bf16(product + fa_from_bf16(bias[col]));
        }
      }
    }
  }
}
