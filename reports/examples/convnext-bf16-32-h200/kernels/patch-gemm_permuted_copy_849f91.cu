// Build and run: nvcc -O3 -std=c++17 -arch=sm_90 fa_permuted_copy_849f91.cu -o check && ./check
#ifndef __CUDACC_RTC__  // the launch that was chosen for the sizes at the end of this file
#define THREADS 1
#define ROWS 128
#define PACKS 1
#define VEC 4
#define SIZE1 56
#define SIZE2 56
#define SIZE3 3
#define SIZE4 4
#endif

// permuted_copy: permuted dims, contiguous
//
// Moves each operand once: permuted 2 B/element, plain 2 B/element.
// Maths in float32, rounded once, at the store.
// Tuning: num_warps=4 packs=1
// Origin: generated for what a GEMM over patches reads and gives.

#ifndef THREADS
#define THREADS 256  // threads along a row
#endif
#ifndef ROWS
#define ROWS 1  // threads along a column
#endif
#ifndef PACKS
#define PACKS 1  // packs of a thread: neighbouring rows, a divisor of their count
#endif
#ifndef ONCE
#define ONCE 1  // 1 where the grid's second side holds all columns
#endif
#ifndef VEC
#define VEC 8  // columns of a pack, a divisor of every row and stride
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

// bfloat16 is the upper half of float32: out of the 32 bits that hold two of them each takes one instruction, the upper one out of
// 16 bits takes two.
__device__ __forceinline__ float to_float32(const Pack<bfloat16_bits>& pack, int lane) {
    if (sizeof(pack) < 4) return to_float32(pack[lane]);
    const unsigned both = reinterpret_cast<const unsigned*>(pack.words)[lane / 2];
    return __uint_as_float(lane % 2 ? both & 0xffff0000u : both << 16);
}

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

template <typename T>
__device__ __forceinline__ void store_pack(T* to, const Pack<T>& pack) {
    typedef typename Pack<T>::word_t word_t;
    #pragma unroll
    for (int n = 0; n < sizeof(pack) / sizeof(word_t); ++n) reinterpret_cast<word_t*>(to)[n] = pack.words[n];
}

// ---- kernel ----

extern "C" __global__ void __launch_bounds__(THREADS * ROWS)
fa_permuted_copy_849f91(
    const bfloat16_bits* __restrict__ permuted_ptr,
    bfloat16_bits* __restrict__ plain_ptr,
    index_t rows,
    index_t size1,
    index_t size2,
    index_t size3,
    index_t size4,
    index_t cols,
    index_t permuted_stride0,
    index_t permuted_stride1,
    index_t permuted_stride2,
    index_t permuted_stride3,
    index_t permuted_stride4,
    index_t plain_stride0,
    index_t plain_stride1,
    index_t plain_stride2,
    index_t plain_stride3,
    index_t plain_stride4) {
#ifdef SIZE1
    __builtin_assume(size1 == SIZE1);  // dividing by what is known takes a few instructions, not twenty
#endif
#ifdef SIZE2
    __builtin_assume(size2 == SIZE2);
#endif
#ifdef SIZE3
    __builtin_assume(size3 == SIZE3);
#endif
#ifdef SIZE4
    __builtin_assume(size4 == SIZE4);
#endif
    const index_t top = ((index_t)blockIdx.x * ROWS + threadIdx.y) * PACKS;  // the thread's first row
    if (top >= rows) return;
    const index_t i3 = top / size4 % size3;
    const index_t i2 = top / size4 / size3 % size2;
    const index_t i1 = top / size4 / size3 / size2 % size1;
    const index_t i0 = top / size4 / size3 / size2 / size1;
    const index_t step = (index_t)gridDim.y * THREADS * VEC;
    for (index_t first = ((index_t)blockIdx.y * THREADS + threadIdx.x) * VEC; first < cols;
         first = ONCE ? cols : first + step) {
        Pack<bfloat16_bits> permuted_packs[PACKS];
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t i4 = top % size4 + p;
            const bool is_inside = top + p < rows;
            const index_t permuted_start = i0 * permuted_stride0 + i1 * permuted_stride1 + i2 * permuted_stride2 + i3 * permuted_stride3 + i4 * permuted_stride4;
            permuted_packs[p] = load_pack(permuted_ptr + (permuted_start + first), is_inside);
        }
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t i4 = top % size4 + p;
            const bool is_inside = top + p < rows;
            const index_t plain_start = i0 * plain_stride0 + i1 * plain_stride1 + i2 * plain_stride2 + i3 * plain_stride3 + i4 * plain_stride4;
            if (!is_inside) continue;
            Pack<bfloat16_bits> plain_pack;
            #pragma unroll
            for (int lane = 0; lane < VEC; ++lane) {
                const float permuted = to_float32(permuted_packs[p], lane);
                plain_pack[lane] = from_float32<bfloat16_bits>(permuted);
            }
            store_pack(plain_ptr + (plain_start + first), plain_pack);
        }
    }
}

// ---- launch, reference and check ----
#ifndef __CUDACC_RTC__

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

// Defaults are the sizes and strides of the kernel's site, in elements. Tensors must be aligned to 16 bytes.
static inline cudaError_t launch(
    cudaStream_t stream,
    const bfloat16_bits* permuted,
    bfloat16_bits* plain,
    index_t rows = 1204224,
    index_t size1 = 56,
    index_t size2 = 56,
    index_t size3 = 3,
    index_t size4 = 4,
    index_t cols = 4,
    index_t permuted_stride0 = 150528,
    index_t permuted_stride1 = 896,
    index_t permuted_stride2 = 4,
    index_t permuted_stride3 = 50176,
    index_t permuted_stride4 = 224,
    index_t plain_stride0 = 150528,
    index_t plain_stride1 = 2688,
    index_t plain_stride2 = 48,
    index_t plain_stride3 = 16,
    index_t plain_stride4 = 4) {
  const dim3 grid((rows + ROWS * PACKS - 1) / (ROWS * PACKS), 1);
  const dim3 block(THREADS, ROWS);
  const int shared_bytes = 0;
  fa_permuted_copy_849f91<<<grid, block, shared_bytes, stream>>>(
      permuted,
      plain,
      rows,
      size1,
      size2,
      size3,
      size4,
      cols,
      permuted_stride0,
      permuted_stride1,
      permuted_stride2,
      permuted_stride3,
      permuted_stride4,
      plain_stride0,
      plain_stride1,
      plain_stride2,
      plain_stride3,
      plain_stride4);
  return cudaGetLastError();
}

#define CHECK_CUDA(call)                                                    \
  do {                                                                      \
    const cudaError_t error = (call);                                       \
    if (error != cudaSuccess) {                                             \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error));   \
      return 2;                                                             \
    }                                                                       \
  } while (0)

namespace check {

static std::mt19937_64 random_bits(0);

template <typename S, typename Convert>
static std::vector<S> normal(size_t count, Convert convert) {
  std::vector<S> found(count);
  for (S &element : found) {
    const uint64_t bits = random_bits();  // four uniform numbers; their sum is close to normal, with variance 1
    const uint64_t sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
    element = convert((static_cast<double>(sum) / 65536 - 2) * 1.7320508);
  }
  return found;
}

template <typename S>
static std::vector<S> below(size_t count, long long limit) {
  std::vector<S> found(count);
  for (S &element : found) element = static_cast<S>(random_bits() % limit);
  return found;
}

static float from_bf16(unsigned short half) {
  const unsigned bits = unsigned{half} << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

static unsigned short to_bf16(double wide) {
  const float number = static_cast<float>(wide);
  unsigned bits;
  std::memcpy(&bits, &number, sizeof bits);
  if (number != number) return 0x7fc0;
  return static_cast<unsigned short>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The same op by op, computed in T. Outputs of floating point are not rounded to their own type.
template <typename T>
static void reference(
    const unsigned short *permuted,
    T *plain) {
  for (long long i0 = 0; i0 < 32; ++i0) {
    for (long long i1 = 0; i1 < 56; ++i1) {
      for (long long i2 = 0; i2 < 56; ++i2) {
        for (long long i3 = 0; i3 < 3; ++i3) {
          for (long long i4 = 0; i4 < 4; ++i4) {
            for (long long i5 = 0; i5 < 4; ++i5) {
              const T permuted_value = T(from_bf16(permuted[i0 * 150528LL + i1 * 896LL + i2 * 4LL + i3 * 50176LL + i4 * 224LL + i5]));
              plain[i0 * 150528LL + i1 * 2688LL + i2 * 48LL + i3 * 16LL + i4 * 4LL + i5] = T(permuted_value);
            }
          }
        }
      }
    }
  }
}

// The norm of the difference over the norm of the truth.
template <typename S, typename T, typename Read>
static double relative_error(const std::vector<S> &found, const std::vector<T> &right, Read read) {
  double difference = 0, scale = 0;
  for (size_t i = 0; i < right.size(); ++i) {
    const double a = read(found[i]), b = static_cast<double>(right[i]);
    if (a == b || (a != a && b != b)) {
      scale += std::isfinite(b) ? b * b : 0;
      continue;
    }
    difference += std::isfinite(a - b) ? (a - b) * (a - b) : INFINITY;
    scale += std::isfinite(b) ? b * b : 0;
  }
  return difference == 0 ? 0 : std::sqrt(difference / scale);
}

// An op-by-op computation in float, rounded once, has the error `plain`; the kernel may have half as much again.
static bool is_within(const char *name, double error, double plain) {
  const double limit = 1.5 * plain + 5e-07;
  std::printf("%s: relative error %.2e, limit %.2e: %s\n", name, error, limit, error <= limit ? "ok" : "WRONG");
  return error <= limit;
}

}  // namespace check

int main() {
  using namespace check;
  std::vector<unsigned short> permuted_host = normal<unsigned short>(4816896, to_bf16);
  std::vector<unsigned short> plain_host(4816896);
  std::vector<double> plain_truth(4816896);
  std::vector<float> plain_plain(4816896);
  reference<double>(permuted_host.data(), plain_truth.data());
  reference<float>(permuted_host.data(), plain_plain.data());
  bfloat16_bits *permuted_device;
  CHECK_CUDA(cudaMalloc(&permuted_device, permuted_host.size() * sizeof permuted_host[0]));
  CHECK_CUDA(cudaMemcpy(permuted_device, permuted_host.data(), permuted_host.size() * sizeof permuted_host[0], cudaMemcpyHostToDevice));
  bfloat16_bits *plain_device;
  CHECK_CUDA(cudaMalloc(&plain_device, plain_host.size() * sizeof plain_host[0]));
  CHECK_CUDA(cudaMemcpy(plain_device, plain_host.data(), plain_host.size() * sizeof plain_host[0], cudaMemcpyHostToDevice));
  CHECK_CUDA(launch(nullptr, permuted_device, plain_device));
  CHECK_CUDA(cudaDeviceSynchronize());
  CHECK_CUDA(cudaMemcpy(plain_host.data(), plain_device, plain_host.size() * sizeof plain_host[0], cudaMemcpyDeviceToHost));
  void *flushed;  // written between runs, so that none of them finds its data in the L2 cache
  const size_t flushed_bytes = size_t{256} << 20;
  CHECK_CUDA(cudaMalloc(&flushed, flushed_bytes));
  cudaEvent_t start, stop;
  CHECK_CUDA(cudaEventCreate(&start));
  CHECK_CUDA(cudaEventCreate(&stop));
  std::vector<double> microseconds;
  for (int run = 0; run < 30; ++run) {
    CHECK_CUDA(cudaMemsetAsync(flushed, 0, flushed_bytes, nullptr));
    CHECK_CUDA(cudaEventRecord(start, nullptr));
    CHECK_CUDA(launch(nullptr, permuted_device, plain_device));
    CHECK_CUDA(cudaEventRecord(stop, nullptr));
    CHECK_CUDA(cudaEventSynchronize(stop));
    float milliseconds = 0;
    CHECK_CUDA(cudaEventElapsedTime(&milliseconds, start, stop));
    microseconds.push_back(milliseconds * 1e3);
  }
  bool is_right = true;
  const auto read_plain = [](unsigned short element) { return static_cast<double>(from_bf16(element)); };
  const auto store_plain = [](float number) { return static_cast<double>(from_bf16(to_bf16(number))); };
  is_right &= is_within("plain", relative_error(plain_host, plain_truth, read_plain),
                        relative_error(plain_plain, plain_truth, store_plain));
  std::sort(microseconds.begin(), microseconds.end());
  const double median = microseconds[microseconds.size() / 2];
  std::printf("fa_permuted_copy_849f91: %.2f us, %.1f GB/s, cold L2 cache\n", median, 19267584.0 / median / 1e3);
  return is_right ? 0 : 1;
}

#endif  // __CUDACC_RTC__
