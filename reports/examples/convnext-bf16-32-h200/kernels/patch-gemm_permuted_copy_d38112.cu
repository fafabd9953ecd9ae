// permuted_copy: permuted dims, contiguous
//
// Moves each operand once: permuted 2 B/element, plain 2 B/element.
// Maths in float32, rounded once, at the store.
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

template <typename T>
__device__ __forceinline__ void store_pack(T* to, const Pack<T>& pack) {
    typedef typename Pack<T>::word_t word_t;
    #pragma unroll
    for (int n = 0; n < sizeof(pack) / sizeof(word_t); ++n) reinterpret_cast<word_t*>(to)[n] = pack.words[n];
}

extern "C" __global__ void __launch_bounds__(THREADS * ROWS)
fa_permuted_copy_d38112(
    const bfloat16_bits* __restrict__ permuted_ptr,
    bfloat16_bits* __restrict__ plain_ptr,
    index_t rows,
    index_t size1,
    index_t size2,
    index_t size3,
    index_t cols,
    index_t permuted_stride0,
    index_t permuted_stride1,
    index_t permuted_stride3,
    index_t permuted_stride4,
    index_t plain_stride0,
    index_t plain_stride1,
    index_t plain_stride2,
    index_t plain_stride3) {
#ifdef SIZE1
    __builtin_assume(size1 == SIZE1);  // dividing by what is known takes a few instructions, not twenty
#endif
#ifdef SIZE2
    __builtin_assume(size2 == SIZE2);
#endif
#ifdef SIZE3
    __builtin_assume(size3 == SIZE3);
#endif
    const index_t top = ((index_t)blockIdx.x * ROWS + threadIdx.y) * PACKS;  // the thread's first row
    if (top >= rows) return;
    const index_t i2 = top / size3 % size2;
    const index_t i1 = top / size3 / size2 % size1;
    const index_t i0 = top / size3 / size2 / size1;
    const index_t step = (index_t)gridDim.y * THREADS * VEC;
    for (index_t first = ((index_t)blockIdx.y * THREADS + threadIdx.x) * VEC; first < cols;
         first = ONCE ? cols : first + step) {
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t i3 = top % size3 + p;
            const bool is_inside = top + p < rows;
            const index_t permuted_start = i0 * permuted_stride0 + i1 * permuted_stride1 + i2 + i3 * permuted_stride3;
            const index_t plain_start = i0 * plain_stride0 + i1 * plain_stride1 + i2 * plain_stride2 + i3 * plain_stride3;
            if (!is_inside) continue;
            Pack<bfloat16_bits> plain_pack;
            #pragma unroll
            for (int lane = 0; lane < VEC; ++lane) {
                const index_t col = first + lane;
                const float permuted = wide(permuted_ptr[permuted_start + col * permuted_stride4]);
                plain_pack[lane] = narrow<bfloat16_bits>(permuted);
            }
            store_pack(plain_ptr + (plain_start + first), plain_pack);
        }
    }
}
