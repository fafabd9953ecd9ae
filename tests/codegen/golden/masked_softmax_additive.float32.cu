// masked_softmax_additive: scale, additive mask and softmax, in one pass
//
// Moves each operand once: scores 4 B/element; mask 4 B/element, the same for every i1; out 4 B/element.
// Maths in float32, rounded once, at the store.
// Origin: library kernel masked_softmax_additive, variant upcast.
// Source: https://arxiv.org/abs/2104.04473

#ifndef THREADS
#define THREADS 256  // threads along a row
#endif
#ifndef ROWS
#define ROWS 1  // rows of a block; 1 when more than a warp shares a row
#endif
#ifndef PACKS
#define PACKS 4  // packs of a thread: PACKS * THREADS * VEC >= cols
#endif
#ifndef VEC
#define VEC 4  // columns of a pack, a divisor of every row and stride
#endif
#ifndef FULL
#define FULL 0  // 1 where PACKS * THREADS * VEC divides cols
#endif
#ifdef WIDE_INDEX
typedef long long index_t;  // an index or an address passes 32 bits
#else
typedef int index_t;
#endif

// ---- helpers ----

#define INF_VALUEF __int_as_float(0x7f800000)

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

template <typename T>
__device__ __forceinline__ void store_pack(T* to, const Pack<T>& pack) {
    typedef typename Pack<T>::word_t word_t;
    #pragma unroll
    for (int n = 0; n < sizeof(pack) / sizeof(word_t); ++n) reinterpret_cast<word_t*>(to)[n] = pack.words[n];
}

// fmaxf and fminf would drop a NaN.
template <typename T>
__device__ __forceinline__ T nan_max(T a, T b) { return (a != a || a > b) ? a : b; }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
// One instruction instead of three.
__device__ __forceinline__ float nan_max(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
#endif

struct Sum {
    template <typename T>
    __device__ T operator()(T a, T b) const { return a + b; }
};
struct Max {
    template <typename T>
    __device__ T operator()(T a, T b) const { return nan_max(a, b); }
};

// Combines one number per thread over a row's threads; every thread gets the result. Each call has its own number, and with
// it its own shared memory: no reader of an earlier one has to be waited for.
template <typename Combine, int NUMBER, typename T>
__device__ __forceinline__ T row_reduce(T value) {
    const Combine combine;
    constexpr int lanes = THREADS < 32 ? THREADS : 32, warps = THREADS / lanes;
    #pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
    if (warps > 1) {
        __shared__ T partial[warps];
        if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
        __syncthreads();
        if (warps >= 8 && (warps & (warps - 1)) == 0) {
            value = partial[threadIdx.x % warps];
            #pragma unroll
            for (int distance = warps / 2; distance > 0; distance /= 2)
                value = combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
        } else {
            value = partial[0];
            #pragma unroll
            for (int warp = 1; warp < warps; ++warp) value = combine(value, partial[warp]);
        }
    }
    return value;
}

// ---- kernel ----

extern "C" __global__ void __launch_bounds__(THREADS * ROWS)
fa_masked_softmax_additive_146a2a(
    const float* __restrict__ scores_ptr,
    const float* __restrict__ mask_ptr,
    float* __restrict__ out_ptr,
    index_t rows,
    index_t size1,
    index_t cols,
    index_t scores_stride0,
    index_t scores_stride1,
    index_t mask_stride0,
    index_t out_stride0,
    index_t out_stride1) {
    const index_t row = (index_t)blockIdx.x * ROWS + threadIdx.y;
    if (ROWS > 1 && row >= rows) return;
    const index_t i1 = row % size1;
    const index_t i0 = row / size1;
    const float* const scores_row = scores_ptr + i0 * scores_stride0 + i1 * scores_stride1;
    float* const out_row = out_ptr + i0 * out_stride0 + i1 * out_stride1;
    const float scale = 0.5f;
    Pack<float> scores_packs[PACKS];
    Pack<float> mask_packs[PACKS];
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        scores_packs[p] = load_pack(scores_row + first, is_inside);
        mask_packs[p] = load_pack(mask_ptr + i0 * mask_stride0 + first, is_inside);
    }

    float total_max_part = -INF_VALUEF;
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float scores = scores_packs[p][lane];
            const float mask_2 = mask_packs[p][lane];
            const float total = scores * scale + mask_2;
            total_max_part = nan_max(total_max_part, total);
        }
    }
    const float total_max = row_reduce<Max, 0>(total_max_part);

    float exp_total_shifted_sum_part = 0;
    float exp_total_shifted_columns[PACKS][VEC];
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float scores = scores_packs[p][lane];
            const float mask_2 = mask_packs[p][lane];
            const float total = scores * scale + mask_2;
            const float exp_total_shifted = expf(total - total_max);
            exp_total_shifted_sum_part += exp_total_shifted;
            exp_total_shifted_columns[p][lane] = exp_total_shifted;
        }
    }
    const float exp_total_shifted_sum = row_reduce<Sum, 1>(exp_total_shifted_sum_part);
    const float inverse_sum = 1.0f / exp_total_shifted_sum;

    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        Pack<float> out_pack;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float exp_total_shifted = exp_total_shifted_columns[p][lane];
            const float out = exp_total_shifted * inverse_sum;
            out_pack[lane] = out;
        }
        store_pack(out_row + first, out_pack);
    }
}
