// rope_qk: rotary position embedding of queries and keys in one launch, read where they lie in their projections
//
// Moves each operand once: q 2 B/element; cos 2 B/element, the same for every i1; sin 2 B/element, the same for
// every i1; q_out 2 B/element; k 2 B/element; k_out 2 B/element.
// Maths in float32, rounded once, at the store.
// Origin: library kernel rope_qk, variant rotate_half.
// Source: https://arxiv.org/abs/2104.09864

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

__device__ __forceinline__ void part1(
    const bfloat16_bits* __restrict__ q_ptr,
    const bfloat16_bits* __restrict__ cos_ptr,
    const bfloat16_bits* __restrict__ sin_ptr,
    bfloat16_bits* __restrict__ q_out_ptr,
    index_t rows,
    index_t size1,
    index_t cols,
    index_t q_stride0,
    index_t q_stride1,
    index_t q_offset,
    index_t cos_stride0,
    index_t cos_offset,
    index_t sin_stride0,
    index_t sin_offset,
    index_t q_out_stride0,
    index_t q_out_stride1,
    index_t q_out_offset,
    index_t block) {
    const index_t top = ((index_t)block * ROWS + threadIdx.y) * PACKS;  // the thread's first row
    if (top >= rows) return;
    const index_t i0 = top / size1;
    const index_t step = (index_t)gridDim.y * THREADS * VEC;
    for (index_t first = ((index_t)blockIdx.y * THREADS + threadIdx.x) * VEC; first < cols;
         first = ONCE ? cols : first + step) {
        Pack<bfloat16_bits> q_packs[PACKS];
        Pack<bfloat16_bits> q_shifted_packs[PACKS];
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t i1 = top % size1 + p;
            const bool is_inside = top + p < rows;
            const index_t q_start = i0 * q_stride0 + i1 * q_stride1;
            q_packs[p] = load_pack(q_ptr + (q_start + first), is_inside);
            q_shifted_packs[p] = load_pack(q_ptr + (q_start + first + q_offset), is_inside);
        }
        const Pack<bfloat16_bits> cos_pack = load_pack(cos_ptr + (i0 * cos_stride0 + first));
        const Pack<bfloat16_bits> cos_shifted_pack = load_pack(cos_ptr + (i0 * cos_stride0 + first + cos_offset));
        const Pack<bfloat16_bits> sin_pack = load_pack(sin_ptr + (i0 * sin_stride0 + first));
        const Pack<bfloat16_bits> sin_shifted_pack = load_pack(sin_ptr + (i0 * sin_stride0 + first + sin_offset));
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t i1 = top % size1 + p;
            const bool is_inside = top + p < rows;
            const index_t q_out_start = i0 * q_out_stride0 + i1 * q_out_stride1;
            if (!is_inside) continue;
            Pack<bfloat16_bits> q_out_pack;
            Pack<bfloat16_bits> q_out_pack_2;
            #pragma unroll
            for (int lane = 0; lane < VEC; ++lane) {
                const float q = to_float32(q_packs[p], lane);
                const float q_shifted = to_float32(q_shifted_packs[p], lane);
                const float cos_2 = to_float32(cos_pack, lane);
                const float cos_shifted = to_float32(cos_shifted_pack, lane);
                const float sin_2 = to_float32(sin_pack, lane);
                const float sin_shifted = to_float32(sin_shifted_pack, lane);
                const float q_out = q * cos_2 + -q_shifted * sin_2;
                const float q_out_shifted = q_shifted * cos_shifted + q * sin_shifted;
                q_out_pack[lane] = from_float32<bfloat16_bits>(q_out);
                q_out_pack_2[lane] = from_float32<bfloat16_bits>(q_out_shifted);
            }
            store_pack(q_out_ptr + (q_out_start + first), q_out_pack);
            store_pack(q_out_ptr + (q_out_start + first + q_out_offset), q_out_pack_2);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS * ROWS)
fa_rope_qk_988d03(
    const bfloat16_bits* __restrict__ q_ptr,
    const bfloat16_bits* __restrict__ cos_ptr,
    const bfloat16_bits* __restrict__ sin_ptr,
    const bfloat16_bits* __restrict__ k_ptr,
    bfloat16_bits* __restrict__ q_out_ptr,
    bfloat16_bits* __restrict__ k_out_ptr,
    index_t start_of_2,
    index_t rows_of_1,
    index_t size1_of_1,
    index_t cols_of_1,
    index_t q_stride0_of_1,
    index_t q_stride1_of_1,
    index_t q_offset_of_1,
    index_t cos_stride0_of_1,
    index_t cos_offset_of_1,
    index_t sin_stride0_of_1,
    index_t sin_offset_of_1,
    index_t q_out_stride0_of_1,
    index_t q_out_stride1_of_1,
    index_t q_out_offset_of_1,
    index_t rows_of_2,
    index_t size1_of_2,
    index_t cols_of_2,
    index_t k_stride0_of_2,
    index_t k_stride1_of_2,
    index_t k_offset_of_2,
    index_t cos_stride0_of_2,
    index_t cos_offset_of_2,
    index_t sin_stride0_of_2,
    index_t sin_offset_of_2,
    index_t k_out_stride0_of_2,
    index_t k_out_stride1_of_2,
    index_t k_out_offset_of_2) {
    if (blockIdx.x < start_of_2)
        part1(q_ptr, cos_ptr, sin_ptr, q_out_ptr, rows_of_1, size1_of_1, cols_of_1, q_stride0_of_1, q_stride1_of_1,
            q_offset_of_1, cos_stride0_of_1, cos_offset_of_1, sin_stride0_of_1, sin_offset_of_1, q_out_stride0_of_1,
            q_out_stride1_of_1, q_out_offset_of_1, (index_t)blockIdx.x);
    else
        part1(k_ptr, cos_ptr, sin_ptr, k_out_ptr, rows_of_2, size1_of_2, cols_of_2, k_stride0_of_2, k_stride1_of_2,
            k_offset_of_2, cos_stride0_of_2, cos_offset_of_2, sin_stride0_of_2, sin_offset_of_2, k_out_stride0_of_2,
            k_out_stride1_of_2, k_out_offset_of_2, (index_t)blockIdx.x - start_of_2);
}
