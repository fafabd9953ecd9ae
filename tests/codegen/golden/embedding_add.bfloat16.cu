// embedding_add: token rows and position rows looked up and added, each row read once
//
// Moves each operand once: ids 8 B/row; weight 2 B/element; position_ids 8 B/row, the same for every i0;
// positions 2 B/element, the same for every i0; out 2 B/element.
// Maths in float32, rounded once, at the store.
// Origin: library kernel embedding_add, variant looked_up.
// Source: https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf

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

extern "C" __device__ void __assertfail(const char* message, const char* file, unsigned line, const char* function, size_t size);

// Whether a position lies in its tensor. One that does not stops the kernel, as it stops torch's: device-side assert triggered.
__device__ __forceinline__ bool checked(long long place, long long extent) {
    const bool is_inside = (unsigned long long)place < (unsigned long long)extent;
    if (!is_inside) __assertfail("position out of range", "fa_embedding_add_e8d6df", 0, "checked", sizeof(char));
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

// ---- kernel ----

extern "C" __global__ void __launch_bounds__(THREADS * ROWS)
fa_embedding_add_e8d6df(
    const long long* __restrict__ ids_ptr,
    const bfloat16_bits* __restrict__ weight_ptr,
    const long long* __restrict__ position_ids_ptr,
    const bfloat16_bits* __restrict__ positions_ptr,
    bfloat16_bits* __restrict__ out_ptr,
    index_t rows,
    index_t size1,
    index_t cols,
    index_t ids_stride0,
    index_t weight_extent,
    index_t weight_step0,
    index_t positions_extent,
    index_t positions_step0,
    index_t out_stride0,
    index_t out_stride1) {
#ifdef SIZE1
    __builtin_assume(size1 == SIZE1);  // dividing by what is known takes a few instructions, not twenty
#endif
    const index_t top = ((index_t)blockIdx.x * ROWS + threadIdx.y) * PACKS;  // the thread's first row
    if (top >= rows) return;
    const index_t i0 = top / size1;
    const index_t step = (index_t)gridDim.y * THREADS * VEC;
    for (index_t first = ((index_t)blockIdx.y * THREADS + threadIdx.x) * VEC; first < cols;
         first = ONCE ? cols : first + step) {
        Pack<bfloat16_bits> weight_packs[PACKS];
        Pack<bfloat16_bits> positions_packs[PACKS];
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t i1 = top % size1 + p;
            const bool is_inside = top + p < rows;
            const index_t ids_start = i0 * ids_stride0 + i1;
            const long long ids = is_inside ? ids_ptr[ids_start] : 0;
            const bool weight_in_bounds = is_inside && checked(ids, weight_extent);
            const long long position_ids = is_inside ? position_ids_ptr[i1] : 0;
            const bool positions_in_bounds = is_inside && checked(position_ids, positions_extent);
            weight_packs[p] = load_pack(weight_ptr + ids * weight_step0 + first, is_inside && weight_in_bounds);
            positions_packs[p] = load_pack(positions_ptr + position_ids * positions_step0 + first, is_inside && positions_in_bounds);
        }
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t i1 = top % size1 + p;
            const bool is_inside = top + p < rows;
            const index_t out_start = i0 * out_stride0 + i1 * out_stride1;
            if (!is_inside) continue;
            Pack<bfloat16_bits> out_pack;
            #pragma unroll
            for (int lane = 0; lane < VEC; ++lane) {
                const float weight = to_float32(weight_packs[p], lane);
                const float positions = to_float32(positions_packs[p], lane);
                const float out = weight + positions;
                out_pack[lane] = from_float32<bfloat16_bits>(out);
            }
            store_pack(out_ptr + (out_start + first), out_pack);
        }
    }
}
