// Build and run: nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a fa_gate_up_48815f.cu -o check && ./check
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

// gate_up: gate and up projections and silu(gate) * up in one GEMM, for the many rows of a prefill
//
// 34.8 GFLOP on 277.3 MB: the weight (37888 x 3584 bfloat16), x and the result, once each.
// Sums in float32, rounded once, at the store.
// Launch: cuda_wgmma rows=80 warps=12 stages=5
// Origin: library kernel gate_up.
// Source: https://arxiv.org/abs/2002.05202

#ifndef M
#define M 128  // rows of x
#endif
#ifndef N
#define N 18944  // columns of the result
#endif
#ifndef K
#define K 3584  // columns of x and of the weight
#endif
#ifndef ROWS
#define ROWS 80  // rows of the gate's weight for a block, and as many of the other half's; a multiple of 16
#endif
#ifndef STAGES
#define STAGES 5  // tiles under way together
#endif
#ifndef CLUSTER
#define CLUSTER 1  // blocks that share the weight's tiles: 1 or 2
#endif
#ifdef WIDE_INDEX
typedef long long index_t;  // an index or an address passes 32 bits
#else
typedef int index_t;
#endif

// ---- helpers ----

// Good to 22 bits; below 2^-126 it is 0, a difference that no 16-bit result shows unless it is made of such numbers alone.
__device__ __forceinline__ float exp2_16bit(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Good to 20 bits, for results that are rounded to 11 at most. A reciprocal would need three more instructions, or lose what is
// below 2^-126; the root of it cannot get there.
__device__ __forceinline__ float sigmoid_16bit(float x) {
    float root;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(1.0f + exp2_16bit(x * -1.4426950408889634f)));
    return root * root;
}

// ---- kernel ----

constexpr int TOKENS = 128;  // rows of x for a block, 64 for each of its two multiplying warpgroups
constexpr int DEPTH = 64;    // columns of a tile: 128 bytes, the span of the swizzle
constexpr unsigned X_BYTES = TOKENS * DEPTH * 2, HALF_BYTES = ROWS * DEPTH * 2, OUT_BYTES = TOKENS / 2 * ROWS * 2;
constexpr unsigned STAGE_BYTES = X_BYTES + 2 * HALF_BYTES;

// The driver's description of a matrix and of the tiles that are copied out of it or into it.
struct alignas(64) TensorMap { char opaque[128]; };

__device__ __forceinline__ unsigned shared_address(const void* place) { return (unsigned)__cvta_generic_to_shared(place); }

__device__ __forceinline__ void wait(unsigned barrier, unsigned phase) {
    asm volatile("{ .reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again; }" :: "r"(barrier), "r"(phase) : "memory");
}
__device__ __forceinline__ void expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
// Of any block of the cluster. Nothing was written that another thread reads, so it need not be released to the cluster: that
// alone made the kernel 1.4 times as slow.
__device__ __forceinline__ void arrive(unsigned barrier, unsigned block) {
    asm volatile("{ .reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }" :: "r"(barrier), "r"(block) : "memory");
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// 128 threads: one of the two multiplying warpgroups.
__device__ __forceinline__ void group_sync(int group) {
    if (group) asm volatile("bar.sync 2, 128;" ::: "memory");
    else asm volatile("bar.sync 1, 128;" ::: "memory");
}
__device__ __forceinline__ void copy_tile(unsigned to, const TensorMap* from, unsigned barrier, int col, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, { %3, %4}], [%2];"
                 :: "r"(to), "l"(from), "r"(barrier), "r"(col), "r"(row) : "memory");
}
// To the same place in every block of the cluster; the barrier at that place in each counts the bytes.
__device__ __forceinline__ void copy_tile_to_all(unsigned to, const TensorMap* from, unsigned barrier, int col, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, { %3, %4}], [%2], %5;"
                 :: "r"(to), "l"(from), "r"(barrier), "r"(col), "r"(row), "h"((short)((1 << CLUSTER) - 1)) : "memory");
}
__device__ __forceinline__ void store_tile(const TensorMap* to, unsigned from, int col, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, { %2, %3}], [%1];"
                 :: "l"(to), "r"(from), "r"(col), "r"(row) : "memory");
}
// A tile's descriptor for wgmma: where it begins, that 8 of its rows lie in 1024 bytes, and that those are swizzled.
__device__ __forceinline__ unsigned long long tile_at(unsigned address) {
    return (unsigned long long)((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// 64 rows of x by ROWS rows of the gate's weight, then as many of the other half's, 16 columns.
__device__ __forceinline__ void multiply(float (&sums)[ROWS], unsigned long long x, unsigned long long weight, int is_added) {
    asm volatile("{ .reg .pred is_added;\n"
                 "setp.ne.b32 is_added, %82, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16\n"
                 "{"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
                 "}, %80, %81, is_added, 1, 1, 0, 0; }"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]),
                   "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),
                   "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]),
                   "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]),
                   "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]),
                   "+f"(sums[30]), "+f"(sums[31]), "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]),
                   "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]), "+f"(sums[40]), "+f"(sums[41]),
                   "+f"(sums[42]), "+f"(sums[43]), "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]),
                   "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]), "+f"(sums[52]), "+f"(sums[53]),
                   "+f"(sums[54]), "+f"(sums[55]), "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]),
                   "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63]), "+f"(sums[64]), "+f"(sums[65]),
                   "+f"(sums[66]), "+f"(sums[67]), "+f"(sums[68]), "+f"(sums[69]), "+f"(sums[70]), "+f"(sums[71]),
                   "+f"(sums[72]), "+f"(sums[73]), "+f"(sums[74]), "+f"(sums[75]), "+f"(sums[76]), "+f"(sums[77]),
                   "+f"(sums[78]), "+f"(sums[79])
                 : "l"(x), "l"(weight), "r"(is_added));
}
__device__ __forceinline__ unsigned gated_pair(const float (&sums)[ROWS], int at) {
    const float low = sums[at] * sigmoid_16bit(sums[at]) * sums[at + ROWS / 2];
    const float high = sums[at + 1] * sigmoid_16bit(sums[at + 1]) * sums[at + 1 + ROWS / 2];
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(384, 1)
fa_gate_up_48815f(
    const __grid_constant__ TensorMap x,
    const __grid_constant__ TensorMap weight,
    const __grid_constant__ TensorMap out) {
    extern __shared__ __align__(1024) char memory[];  // STAGES of tiles of x, gate and up; then the warpgroups' results
    __shared__ __align__(8) unsigned long long barriers[2 * STAGES];
    const unsigned stages = shared_address(memory), filled = shared_address(barriers), emptied = filled + 8 * STAGES;
    unsigned block = 0;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    if (threadIdx.x == 0) {
        for (int n = 0; n < STAGES; ++n) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(filled + 8 * n) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(emptied + 8 * n), "r"(2 * CLUSTER) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();

    // A cluster's blocks take neighbouring rows of x and share the weight's. Neighbouring clusters take the same rows of the
    // weight too, so that it is read from memory once.
    constexpr int DOWN = (M + TOKENS * CLUSTER - 1) / (TOKENS * CLUSTER), TILES = DOWN * ((N + ROWS - 1) / ROWS);
    constexpr int STEPS = (K + DEPTH - 1) / DEPTH;
    const int first = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER, warpgroup = threadIdx.x / 128;
    int stage = 0;
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        unsigned phase = 1;  // a stage that was never filled is empty
        for (int tile = first; threadIdx.x == 0 && tile < TILES; tile += clusters) {
            const int token = (tile % DOWN * CLUSTER + block) * TOKENS, row = tile / DOWN * ROWS;
            for (int step = 0; step < STEPS; ++step) {
                const unsigned to = stages + stage * STAGE_BYTES, barrier = filled + 8 * stage;
                wait(emptied + 8 * stage, phase);
                expect(barrier, STAGE_BYTES);
                copy_tile(to, &x, barrier, step * DEPTH, token);
                if constexpr (CLUSTER == 2) {
                    copy_tile_to_all(to + X_BYTES + block * HALF_BYTES, &weight, barrier, step * DEPTH, row + block * N);
                } else {
                    copy_tile(to + X_BYTES, &weight, barrier, step * DEPTH, row);
                    copy_tile(to + X_BYTES + HALF_BYTES, &weight, barrier, step * DEPTH, row + N);
                }
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int group = warpgroup - 1, thread = threadIdx.x % 128, lane = thread % 32;
        const unsigned result = stages + STAGES * STAGE_BYTES + group * OUT_BYTES;
        // A thread has columns 8 j + 2 (lane % 4) and the next of rows lane / 4 and lane / 4 + 8, of the gate and of the other half.
        float sums[ROWS];
        unsigned phase = 0;
        for (int tile = first; tile < TILES; tile += clusters) {
            int before = 0;
            for (int step = 0; step < STEPS; ++step) {
                const unsigned from = stages + stage * STAGE_BYTES;
                wait(filled + 8 * stage, phase);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                const unsigned long long rows_of_x = tile_at(from + group * X_BYTES / 2), rows_of_weight = tile_at(from + X_BYTES);
                #pragma unroll
                for (int n = 0; n < DEPTH / 16; ++n) multiply(sums, rows_of_x + 2 * n, rows_of_weight + 2 * n, step | n);
                // The tensor cores go on with this stage while the one before is given back.
                asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (step && thread < CLUSTER) arrive(emptied + 8 * before, thread);
                before = stage;
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            // The sums are no memory: what reads them could be moved ahead of the wait.
            #pragma unroll
            for (int n = 0; n < ROWS; ++n) asm volatile("" : "+f"(sums[n]));
            if (thread < CLUSTER) arrive(emptied + 8 * before, thread);

            if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the tile before is out of there
            group_sync(group);
            // Lanes 0 to 15 name the rows of the first 8 columns, 16 to 31 those of the next 8.
            const unsigned to = result + (thread / 32 * 16 + lane % 16) * ROWS * 2 + lane / 16 * 16;
            #pragma unroll
            for (int col = 0; col < ROWS / 8; col += 2) {
                asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4};"
                             :: "r"(to + col * 16), "r"(gated_pair(sums, 4 * col)), "r"(gated_pair(sums, 4 * col + 2)),
                                "r"(gated_pair(sums, 4 * col + 4)), "r"(gated_pair(sums, 4 * col + 6)) : "memory");
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            group_sync(group);
            if (thread == 0) {
                const int token = (tile % DOWN * CLUSTER + block) * TOKENS + group * TOKENS / 2;
                store_tile(&out, result, tile / DOWN * ROWS, token);
                asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            }
        }
        if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    cluster_sync();  // a block's shared memory must be there for what the other one still sends
}

// ---- launch, reference and check ----
#ifndef __CUDACC_RTC__

// The driver's description of a row-major matrix and of the tiles that are copied out of it or into it.
static bool describe(TensorMap* map, const void* data, unsigned long long rows, unsigned long long cols, unsigned tile_rows,
                     unsigned tile_cols, bool is_swizzled) {
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found) != cudaSuccess) return false;
  const cuuint64_t sizes[] = {cols, rows}, row_bytes[] = {cols * sizeof(element)};
  const cuuint32_t tile[] = {tile_cols, tile_rows}, steps[] = {1, 1};
  CUtensorMap encoded;
  static_assert(sizeof encoded == sizeof *map, "a tensor map has 128 bytes");
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
      &encoded, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes, row_bytes, tile, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, is_swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  std::memcpy(map, &encoded, sizeof encoded);
  return result == CUDA_SUCCESS;
}

// Sizes are those of the kernel's site, which are constants of the kernel. Tensors must be contiguous and aligned to 16 bytes.
static inline cudaError_t launch(
    cudaStream_t stream,
    const element* x,
    const element* weight,
    element* out) {
  TensorMap x_map;
  if (!describe(&x_map, x, M, K, TOKENS, DEPTH, true)) return cudaErrorNotSupported;
  TensorMap weight_map;
  if (!describe(&weight_map, weight, 2 * N, K, ROWS, DEPTH, true)) return cudaErrorNotSupported;
  TensorMap out_map;
  if (!describe(&out_map, out, M, N, TOKENS / 2, ROWS, false)) return cudaErrorNotSupported;
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const int tiles = (M + TOKENS * CLUSTER - 1) / (TOKENS * CLUSTER) * ((N + ROWS - 1) / ROWS);
  const int clusters = std::max(1, multiprocessors / CLUSTER);
  const dim3 grid(CLUSTER * std::min(tiles, clusters));
  const dim3 block(384);
  const int shared_bytes = 204800;
  const cudaError_t error = cudaFuncSetAttribute(fa_gate_up_48815f, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  fa_gate_up_48815f<<<grid, block, shared_bytes, stream>>>(x_map, weight_map, out_map);
  return cudaGetLastError();
}

namespace check {

template <typename T>
static __host__ __device__ T number(element bits) { return static_cast<T>(static_cast<float>(bits)); }

// One element of the result, op by op, computed in T and not rounded.
template <typename T>
static __host__ __device__ T result(
    const element* x,
    const element* weight,
    long long row, long long col) {
  T value = 0, up = 0;
  for (long long k = 0; k < K; ++k) {
    const T factor = number<T>(x[row * K + k]);
    value += factor * number<T>(weight[col * K + k]);
    up += factor * number<T>(weight[(N + col) * K + k]);
  }
  value = value / (T(1) + exp(-value)) * up;
  return value;
}

template <typename T>
static __global__ void reference(
    const element* x,
    const element* weight,
    T* out) {
  const long long index = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (index < (long long)M * N) out[index] = result<T>(x, weight, index / N, index % N);
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
  CHECK_CUDA(cudaMalloc(&x, 458752ull * sizeof(element)));
  check::fill<<<458752ull / 256 + 1, 256>>>(x, 458752ull, 1, 1.000000f);
  element* weight;
  CHECK_CUDA(cudaMalloc(&weight, 135790592ull * sizeof(element)));
  check::fill<<<135790592ull / 256 + 1, 256>>>(weight, 135790592ull, 2, 0.016704f);
  element* out;
  CHECK_CUDA(cudaMalloc(&out, 2424832ull * sizeof(element)));
  constexpr size_t count = size_t(M) * N;
  double* truth_device;
  float* plain_device;
  CHECK_CUDA(cudaMalloc(&truth_device, count * sizeof(double)));
  CHECK_CUDA(cudaMalloc(&plain_device, count * sizeof(float)));
  check::reference<double><<<count / 256 + 1, 256>>>(x, weight, truth_device);
  check::reference<float><<<count / 256 + 1, 256>>>(x, weight, plain_device);
  CHECK_CUDA(launch(nullptr, x, weight, out));
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
    CHECK_CUDA(launch(nullptr, x, weight, out));
    CHECK_CUDA(cudaEventRecord(stop, nullptr));
    CHECK_CUDA(cudaEventSynchronize(stop));
    float milliseconds = 0;
    CHECK_CUDA(cudaEventElapsedTime(&milliseconds, start, stop));
    microseconds.push_back(milliseconds * 1e3);
  }
  std::sort(microseconds.begin(), microseconds.end());
  const double median = microseconds[microseconds.size() / 2];
  std::printf("fa_gate_up_48815f: %.2f us, %.1f GB/s, %.1f TFLOP/s, cold L2 cache\n", median, 277348352.0 / median / 1e3,
              34762391552.0 / median / 1e6);
  return error <= limit ? 0 : 1;
}

#endif  // __CUDACC_RTC__
