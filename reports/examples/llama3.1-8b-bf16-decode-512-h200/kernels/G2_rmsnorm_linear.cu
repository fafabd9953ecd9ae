// Build and run: nvcc -O3 -std=c++17 -arch=sm_90 fa_rmsnorm_linear_9da2bf.cu -o check && ./check
#ifndef __CUDACC_RTC__  // before the macros of the kernel, whose names these headers use
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef __nv_bfloat16 element;
#endif

// rmsnorm_linear: RMSNorm and the linear layer after it, for the few rows of decoding; the weight is read once
//
// Reads the weight (6144 x 4096 bfloat16, 50.3 MB) once, for 1 row of x.
// Sums in float32, rounded once, at the store.
// The norm's factor of a row is one for all its results: the squares are summed up along the way.
// Launch: cuda_fma rows=4 warps=4 unroll=1
// Origin: library kernel rmsnorm_linear.
// Source: https://arxiv.org/abs/1910.07467

#ifndef M
#define M 1  // rows of x
#endif
#ifndef N
#define N 6144  // columns of the result
#endif
#ifndef K
#define K 4096  // columns of x and of the weight
#endif
#ifndef ROWS
#define ROWS 4  // rows of the weight for a block
#endif
#ifndef WARPS
#define WARPS 4  // warps of a block: they share the columns
#endif
#ifndef UNROLL
#define UNROLL 1  // loads of a thread from each row that are under way together
#endif
#ifndef VEC
#define VEC 8  // columns of one load
#endif
#ifdef WIDE_INDEX
typedef long long index_t;  // an index or an address passes 32 bits
#else
typedef int index_t;
#endif

// ---- helpers ----

struct bfloat16_bits { unsigned short bits; };

__device__ __forceinline__ float to_float32(bfloat16_bits x) { return __uint_as_float((unsigned)x.bits << 16); }

template <typename T>
__device__ __forceinline__ T from_float32(float x);

template <>
__device__ __forceinline__ bfloat16_bits from_float32(float x) {
    bfloat16_bits y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

template <int BYTES> struct Word { typedef uint4 type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<4> { typedef unsigned type; };
template <> struct Word<2> { typedef unsigned short type; };
template <> struct Word<1> { typedef unsigned char type; };

// VEC neighbours in a row: one 16-byte access (or two). The launch sees to it that rows hold whole packs and are aligned.
template <typename T>
union Pack {
    typedef typename Word<sizeof(T) * VEC>::type word_t;
    word_t words[sizeof(T) * VEC / sizeof(word_t)];  // what is copied: two halves stay in one register
    T at[VEC];
    __device__ __forceinline__ T& operator[](int lane) { return at[lane]; }
    __device__ __forceinline__ const T& operator[](int lane) const { return at[lane]; }
};

// Zeros, unread, where it is not wanted.
template <typename T>
__device__ __forceinline__ Pack<T> load_pack(const T* from, bool is_wanted = true) {
    typedef typename Pack<T>::word_t word_t;
    Pack<T> pack;
    #pragma unroll
    for (int n = 0; n < sizeof(pack) / sizeof(word_t); ++n)
        pack.words[n] = is_wanted ? reinterpret_cast<const word_t*>(from)[n] : word_t{};
    return pack;
}

__device__ __forceinline__ unsigned long long stream_policy() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// What is read once passes by the L1 cache and is the first to leave the L2. Volatile: the loads stay in front of what does not
// wait for them, and next to each other.
template <typename T>
__device__ __forceinline__ Pack<T> stream_pack(const T* from, bool is_wanted, unsigned long long policy) {
    if constexpr (sizeof(T) * VEC != 16) {
        return load_pack(from, is_wanted);
    } else {
        Pack<T> pack;
        uint4& word = pack.words[0];
        word = uint4{0, 0, 0, 0};
        if (is_wanted)
            asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 { %0, %1, %2, %3}, [%4], %5;"
                         : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w) : "l"(from), "l"(policy));
        return pack;
    }
}

// Sum over neighbouring lanes of a warp, a power of two of them; always in the same order.
template <int LANES>
__device__ __forceinline__ float lanes_sum(float value) {
    #pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

// ---- kernel ----

extern "C" __global__ void __launch_bounds__(WARPS * 32)
fa_rmsnorm_linear_9da2bf(
    const bfloat16_bits* __restrict__ x,
    const bfloat16_bits* __restrict__ norm_weight,
    const bfloat16_bits* __restrict__ weight,
    bfloat16_bits* __restrict__ out) {
    constexpr int LINES = ROWS;
    constexpr int TOKENS = 1;
    // The squares of x have the last column.
    __shared__ float partial[WARPS][TOKENS][LINES + 1];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = blockIdx.x * ROWS;
    const unsigned long long policy = stream_policy();

    const bfloat16_bits* lines[LINES];
    #pragma unroll
    for (int line = 0; line < LINES; ++line)
        lines[line] = weight + (long long)(min(first + line % ROWS, N - 1) + line / ROWS * N) * K;
    float sums[M][LINES] = {};
    float squares[M] = {};

    #pragma unroll 1
    for (int start = threadIdx.x * VEC; start < K; start += UNROLL * WARPS * 32 * VEC) {
        // The weight's loads first, all of them: they take longest.
        Pack<bfloat16_bits> tiles[UNROLL][LINES];
        #pragma unroll
        for (int step = 0; step < UNROLL; ++step) {
            const int at = start + step * WARPS * 32 * VEC;
            #pragma unroll
            for (int line = 0; line < LINES; ++line) tiles[step][line] = stream_pack(lines[line] + at, at < K, policy);
        }
        #pragma unroll
        for (int step = 0; step < UNROLL; ++step) {
            const int at = start + step * WARPS * 32 * VEC;
            const Pack<bfloat16_bits> norm = load_pack(norm_weight + at, at < K);
            #pragma unroll
            for (int token = 0; token < M; ++token) {
                const Pack<bfloat16_bits> tokens = load_pack(x + token * K + at, at < K);
                #pragma unroll
                for (int col = 0; col < VEC; ++col) {
                    const float value = to_float32(tokens[col]);
                    squares[token] = fmaf(value, value, squares[token]);
                    const float term = value * to_float32(norm[col]);
                    #pragma unroll
                    for (int line = 0; line < LINES; ++line)
                        sums[token][line] = fmaf(term, to_float32(tiles[step][line][col]), sums[token][line]);
                }
            }
        }
    }

    #pragma unroll
    for (int token = 0; token < M; ++token) {
        #pragma unroll
        for (int line = 0; line < LINES; ++line) {
            const float sum = lanes_sum<32>(sums[token][line]);
            if (lane == 0) partial[warp][token][line] = sum;
        }
        const float sum = lanes_sum<32>(squares[token]);
        if (lane == 0) partial[warp][token][LINES] = sum;
    }
    __syncthreads();

    // Warps are added in order: every run gives the same bits.
    const auto total = [&](int token, int line) {
        float sum = partial[0][token][line];
        #pragma unroll
        for (int other = 1; other < WARPS; ++other) sum += partial[other][token][line];
        return sum;
    };
    for (int place = threadIdx.x; place < M * ROWS; place += WARPS * 32) {
        const int token = place / ROWS, row = first + place % ROWS;
        if (row >= N) continue;
        float value = total(token, place % ROWS);
        const float scale = 1.0f / sqrtf(total(token, LINES) / K + 1e-05f);
        value *= scale;
        out[token * N + row] = from_float32<bfloat16_bits>(value);
    }
}

// ---- launch, reference and check ----
#ifndef __CUDACC_RTC__

// Sizes are those of the kernel's site, which are constants of the kernel. Tensors must be contiguous and aligned to 16 bytes.
static inline cudaError_t launch(
    cudaStream_t stream,
    const element* x,
    const element* norm_weight,
    const element* weight,
    element* out) {
  const dim3 grid((N + ROWS - 1) / ROWS);
  const dim3 block(WARPS * 32);
  fa_rmsnorm_linear_9da2bf<<<grid, block, 0, stream>>>(
      reinterpret_cast<const bfloat16_bits*>(x),
      reinterpret_cast<const bfloat16_bits*>(norm_weight),
      reinterpret_cast<const bfloat16_bits*>(weight),
      reinterpret_cast<bfloat16_bits*>(out));
  return cudaGetLastError();
}

namespace check {

template <typename T>
static __host__ __device__ T number(element bits) { return static_cast<T>(static_cast<float>(bits)); }

// One element of the result, op by op, computed in T and not rounded.
template <typename T>
static __host__ __device__ T result(
    const element* x,
    const element* norm_weight,
    const element* weight,
    long long row, long long col) {
  T squares = 0;
  for (long long k = 0; k < K; ++k) squares += number<T>(x[row * K + k]) * number<T>(x[row * K + k]);
  const T inverse_rms = T(1) / sqrt(squares / T(K) + T(1e-05));
  T value = 0;
  for (long long k = 0; k < K; ++k) {
    const T factor = number<T>(x[row * K + k]) * inverse_rms * (number<T>(norm_weight[k]) + T(0.0));
    value += factor * number<T>(weight[col * K + k]);
  }
  return value;
}

template <typename T>
static __global__ void reference(
    const element* x,
    const element* norm_weight,
    const element* weight,
    T* out) {
  const long long index = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (index < (long long)M * N) out[index] = result<T>(x, norm_weight, weight, index / N, index % N);
}

// A hash of the index gives four uniform numbers; their sum is close to normal.
static __host__ __device__ float normal(unsigned long long index, unsigned long long seed) {
  unsigned long long bits = (index + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
  bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9ull;
  bits = (bits ^ bits >> 27) * 0x94D049BB133111EBull;
  bits ^= bits >> 31;
  const unsigned long long sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
  return (sum / 65536.0f - 2) * 1.7320508f;
}

static __global__ void fill(element* to, long long count, unsigned long long seed, float scale) {
  const long long index = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (index < count) to[index] = element(normal(index, seed) * scale);
}

// The norm of the difference over the norm of the truth.
template <typename S>
static double relative_error(const std::vector<S>& found, const std::vector<double>& truth) {
  double difference = 0, scale = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    const double error = static_cast<double>(static_cast<float>(element(found[i]))) - truth[i];
    difference += std::isfinite(error) ? error * error : INFINITY;
    scale += truth[i] * truth[i];
  }
  return difference == 0 ? 0 : std::sqrt(difference / scale);
}

}  // namespace check

#define CHECK_CUDA(call)                                                    \
  do {                                                                      \
    const cudaError_t error = (call);                                       \
    if (error != cudaSuccess) {                                             \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error));   \
      return 2;                                                             \
    }                                                                       \
  } while (0)

int main() {
  element* x;
  CHECK_CUDA(cudaMalloc(&x, 4096ull * sizeof(element)));
  check::fill<<<4096ull / 256 + 1, 256>>>(x, 4096ull, 1, 1.000000f);
  element* norm_weight;
  CHECK_CUDA(cudaMalloc(&norm_weight, 4096ull * sizeof(element)));
  check::fill<<<4096ull / 256 + 1, 256>>>(norm_weight, 4096ull, 2, 1.000000f);
  element* weight;
  CHECK_CUDA(cudaMalloc(&weight, 25165824ull * sizeof(element)));
  check::fill<<<25165824ull / 256 + 1, 256>>>(weight, 25165824ull, 3, 0.015625f);
  element* out;
  CHECK_CUDA(cudaMalloc(&out, 6144ull * sizeof(element)));
  constexpr size_t count = size_t(M) * N;
  double* truth_device;
  float* plain_device;
  CHECK_CUDA(cudaMalloc(&truth_device, count * sizeof(double)));
  CHECK_CUDA(cudaMalloc(&plain_device, count * sizeof(float)));
  check::reference<double><<<count / 256 + 1, 256>>>(x, norm_weight, weight, truth_device);
  check::reference<float><<<count / 256 + 1, 256>>>(x, norm_weight, weight, plain_device);
  CHECK_CUDA(launch(nullptr, x, norm_weight, weight, out));
  CHECK_CUDA(cudaDeviceSynchronize());
  std::vector<double> truth(count);
  std::vector<float> plain(count);
  std::vector<element> found(count);
  CHECK_CUDA(cudaMemcpy(truth.data(), truth_device, count * sizeof(double), cudaMemcpyDeviceToHost));
  CHECK_CUDA(cudaMemcpy(plain.data(), plain_device, count * sizeof(float), cudaMemcpyDeviceToHost));
  CHECK_CUDA(cudaMemcpy(found.data(), out, count * sizeof(element), cudaMemcpyDeviceToHost));
  // A computation op by op in float, rounded once, has this error; the kernel may have half as much again.
  const double limit = 1.5 * check::relative_error(plain, truth) + 2e-06;
  const double error = check::relative_error(found, truth);
  std::printf("out: relative error %.2e, limit %.2e: %s\n", error, limit, error <= limit ? "ok" : "WRONG");

  void* flushed;  // written between runs, so that none of them finds its data in the L2 cache
  const size_t flushed_bytes = size_t{256} << 20;
  CHECK_CUDA(cudaMalloc(&flushed, flushed_bytes));
  cudaEvent_t start, stop;
  CHECK_CUDA(cudaEventCreate(&start));
  CHECK_CUDA(cudaEventCreate(&stop));
  std::vector<double> microseconds;
  for (int run = 0; run < 30; ++run) {
    CHECK_CUDA(cudaMemsetAsync(flushed, 0, flushed_bytes, nullptr));
    CHECK_CUDA(cudaEventRecord(start, nullptr));
    CHECK_CUDA(launch(nullptr, x, norm_weight, weight, out));
    CHECK_CUDA(cudaEventRecord(stop, nullptr));
    CHECK_CUDA(cudaEventSynchronize(stop));
    float milliseconds = 0;
    CHECK_CUDA(cudaEventElapsedTime(&milliseconds, start, stop));
    microseconds.push_back(milliseconds * 1e3);
  }
  std::sort(microseconds.begin(), microseconds.end());
  const double median = microseconds[microseconds.size() / 2];
  std::printf("fa_rmsnorm_linear_9da2bf: %.2f us, %.1f GB/s, %.1f TFLOP/s, cold L2 cache\n", median, 50360320.0 / median / 1e3,
              50331648.0 / median / 1e6);
  return error <= limit ? 0 : 1;
}

#endif  // __CUDACC_RTC__
