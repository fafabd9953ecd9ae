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

struct bfloat16_bits { unsigned short bits; };

__device__ __forceinline__ float wide(bfloat16_bits x) { return __uint_as_float((unsigned)x.bits << 16); }

template <typename T>
__device__ __forceinline__ T narrow(float x);

template <>
__device__ __forceinline__ bfloat16_bits narrow(float x) {
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
__device__ __forceinline__ float wide(const Pack<bfloat16_bits>& pack, int lane) {
    if (sizeof(pack) < 4) return wide(pack[lane]);
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
                const float permuted = wide(permuted_packs[p], lane);
                plain_pack[lane] = narrow<bfloat16_bits>(permuted);
            }
            store_pack(plain_ptr + (plain_start + first), plain_pack);
        }
    }
}
