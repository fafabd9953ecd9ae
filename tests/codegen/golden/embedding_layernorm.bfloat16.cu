// embedding_layernorm: token rows looked up and LayerNormed in one pass
//
// Moves each operand once: ids 8 B/row, table 2 B/element, weight 2 B/column, bias 2 B/column, out 2 B/element.
// Maths in float32, rounded once, at the store.
// Origin: library kernel embedding_layernorm, variant builtin.
// Source: https://arxiv.org/abs/1607.06450

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
#define VEC 8  // columns of a pack, a divisor of every row and stride
#endif
#ifndef FULL
#define FULL 0  // 1 where PACKS * THREADS * VEC divides cols
#endif
#ifndef LATE
#define LATE 1  // 1 where what rows share is read after the reductions
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
    if (!is_inside) __assertfail("position out of range", "fa_embedding_layernorm_963316", 0, "checked", sizeof(char));
    return is_inside;
}

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
fa_embedding_layernorm_963316(
    const long long* __restrict__ ids_ptr,
    const bfloat16_bits* __restrict__ table_ptr,
    const bfloat16_bits* __restrict__ weight_ptr,
    const bfloat16_bits* __restrict__ bias_ptr,
    bfloat16_bits* __restrict__ out_ptr,
    index_t rows,
    index_t cols,
    index_t table_extent,
    index_t table_step0,
    index_t out_stride0) {
    const index_t row = (index_t)blockIdx.x * ROWS + threadIdx.y;
    if (ROWS > 1 && row >= rows) return;
    if (FULL) __builtin_assume(cols == PACKS * THREADS * VEC);  // a mean then takes no division
    const long long ids = ids_ptr[row];
    const bool table_in_bounds = checked(ids, table_extent);
    const float eps = 1e-05f;
    Pack<bfloat16_bits> table_packs[PACKS];
    Pack<bfloat16_bits> weight_packs[PACKS];
    Pack<bfloat16_bits> bias_packs[PACKS];
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        table_packs[p] = load_pack(table_ptr + ids * table_step0 + first, is_inside && table_in_bounds);
        if (!LATE) weight_packs[p] = load_pack(weight_ptr + first, is_inside);
        if (!LATE) bias_packs[p] = load_pack(bias_ptr + first, is_inside);
    }

    float table_sum_part = 0;
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float table = to_float32(table_packs[p], lane);
            table_sum_part += table;
        }
    }
    const float table_sum = row_reduce<Sum, 0>(table_sum_part);
    const float table_mean = mean_of(table_sum, (float)cols);

    float table_centered_squared_sum_part = 0;
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float table = to_float32(table_packs[p], lane);
            const float table_centered = table - table_mean;
            table_centered_squared_sum_part += table_centered * table_centered;
        }
    }
    const float table_centered_squared_sum = row_reduce<Sum, 1>(table_centered_squared_sum_part);
    const float table_variance = mean_of(table_centered_squared_sum, (float)cols);
    const float inverse_deviation = rsqrtf(table_variance + eps);

    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        Pack<bfloat16_bits> out_pack;
        if (LATE) weight_packs[p] = load_pack(weight_ptr + first);
        if (LATE) bias_packs[p] = load_pack(bias_ptr + first);
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float table = to_float32(table_packs[p], lane);
            const float table_centered = table - table_mean;
            const float weight = to_float32(weight_packs[p], lane);
            const float bias = to_float32(bias_packs[p], lane);
            const float out = table_centered * inverse_deviation * weight + bias;
            out_pack[lane] = from_float32<bfloat16_bits>(out);
        }
        store_pack(out_ptr + row * out_stride0 + first, out_pack);
    }
}
