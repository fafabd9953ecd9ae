// embedding_rmsnorm: token rows looked up for the residual stream, and RMS-normed for the first block
//
// Moves each operand once: ids 8 B/row, table 4 B/element, weight 4 B/column, rows 4 B/element, out 4 B/element.
// Maths in float32, rounded once, at the store.
// Origin: library kernel embedding_rmsnorm, variant llama.
// Source: https://arxiv.org/abs/1910.07467

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

extern "C" __device__ void __assertfail(const char* message, const char* file, unsigned line, const char* function, size_t size);

// Whether a position lies in its tensor. One that does not stops the kernel, as it stops torch's: device-side assert triggered.
__device__ __forceinline__ bool checked(long long place, long long extent) {
    const bool is_inside = (unsigned long long)place < (unsigned long long)extent;
    if (!is_inside) __assertfail("position out of range", "fa_embedding_rmsnorm_9dee3b", 0, "checked", sizeof(char));
    return is_inside;
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

template <typename T>
__device__ __forceinline__ void store_pack(T* to, const Pack<T>& pack) {
    typedef typename Pack<T>::word_t word_t;
    #pragma unroll
    for (int n = 0; n < sizeof(pack) / sizeof(word_t); ++n) reinterpret_cast<word_t*>(to)[n] = pack.words[n];
}

// Rounded as IEEE division rounds, by Markstein (1990): the product with the reciprocal, which is a constant where the launch knows
// the count, and a correction by what it leaves over. The division itself is 14 instructions and a call.
__device__ __forceinline__ float mean_of(float total, float count) {
    const float inverse = 1.0f / count, mean = __fmul_rn(total, inverse);  // no fused difference may take it unrounded
    const float rounded = fmaf(fmaf(-mean, count, total), inverse, mean);
    return mean - mean == 0.0f ? rounded : mean;  // infinity leaves NaN over
}

struct Sum {
    template <typename T>
    __device__ T operator()(T a, T b) const { return a + b; }
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
fa_embedding_rmsnorm_9dee3b(
    const long long* __restrict__ ids_ptr,
    const float* __restrict__ table_ptr,
    const float* __restrict__ weight_ptr,
    float* __restrict__ rows_ptr,
    float* __restrict__ out_ptr,
    index_t rows,
    index_t cols,
    index_t table_extent,
    index_t table_step0,
    index_t rows_stride0,
    index_t out_stride0) {
    const index_t row = (index_t)blockIdx.x * ROWS + threadIdx.y;
    if (ROWS > 1 && row >= rows) return;
    if (FULL) __builtin_assume(cols == PACKS * THREADS * VEC);  // a mean then takes no division
    const long long ids = ids_ptr[row];
    const bool table_in_bounds = checked(ids, table_extent);
    const float eps = 1e-06f;
    Pack<float> table_packs[PACKS];
    Pack<float> weight_packs[PACKS];
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        table_packs[p] = load_pack(table_ptr + ids * table_step0 + first, is_inside && table_in_bounds);
        weight_packs[p] = load_pack(weight_ptr + first, is_inside);
    }

    float table_squared_sum_part = 0;
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        Pack<float> rows_pack;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float table = table_packs[p][lane];
            table_squared_sum_part += table * table;
            rows_pack[lane] = table;
        }
        store_pack(rows_ptr + row * rows_stride0 + first, rows_pack);
    }
    const float table_squared_sum = row_reduce<Sum, 0>(table_squared_sum_part);
    const float table_squared_mean_eps = mean_of(table_squared_sum, (float)cols) + eps;
    const float inverse_rms = rsqrtf(table_squared_mean_eps);

    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        Pack<float> out_pack;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float table = table_packs[p][lane];
            const float weight = weight_packs[p][lane];
            const float out = weight * (table * inverse_rms);
            out_pack[lane] = out;
        }
        store_pack(out_ptr + row * out_stride0 + first, out_pack);
    }
}
