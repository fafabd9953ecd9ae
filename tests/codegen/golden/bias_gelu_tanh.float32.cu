// bias_gelu_tanh: bias add and GELU with the tanh approximation, in one pass
//
// Moves each operand once: x 4 B/element, bias 4 B/column, out 4 B/element.
// Maths in float32, rounded once, at the store.
// Origin: library kernel bias_gelu_tanh, variant builtin.
// Source: https://arxiv.org/abs/2104.04473

#ifndef THREADS
#define THREADS 256  // threads along a row
#endif
#ifndef ROWS
#define ROWS 1  // threads along a column
#endif
#ifndef PACKS
#define PACKS 4  // packs of a thread: neighbouring rows
#endif
#ifndef ONCE
#define ONCE 1  // 1 where the grid's second side holds all columns
#endif
#ifndef VEC
#define VEC 4  // columns of a pack, a divisor of every row and stride
#endif
#ifdef WIDE_INDEX
typedef long long index_t;  // an index or an address passes 32 bits
#else
typedef int index_t;
#endif

// ---- helpers ----

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

// For very negative x exp(-x) is inf and 1 / inf is 0: no overflow to guard.
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// ---- kernel ----

extern "C" __global__ void __launch_bounds__(THREADS * ROWS)
fa_bias_gelu_tanh_c6758c(
    const float* __restrict__ x_ptr,
    const float* __restrict__ bias_ptr,
    float* __restrict__ out_ptr,
    index_t rows,
    index_t cols,
    index_t x_stride0,
    index_t out_stride0) {
    const index_t top = ((index_t)blockIdx.x * ROWS + threadIdx.y) * PACKS;  // the thread's first row
    if (top >= rows) return;
    const index_t step = (index_t)gridDim.y * THREADS * VEC;
    for (index_t first = ((index_t)blockIdx.y * THREADS + threadIdx.x) * VEC; first < cols;
         first = ONCE ? cols : first + step) {
        Pack<float> x_packs[PACKS];
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t row = top + p;
            const bool is_inside = row < rows;
            x_packs[p] = load_pack(x_ptr + (row * x_stride0 + first), is_inside);
        }
        const Pack<float> bias_pack = load_pack(bias_ptr + first);
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t row = top + p;
            const bool is_inside = row < rows;
            if (!is_inside) continue;
            Pack<float> out_pack;
            #pragma unroll
            for (int lane = 0; lane < VEC; ++lane) {
                const float x = x_packs[p][lane];
                const float bias = bias_pack[lane];
                const float total = x + bias;
                const float product = (total + total * (total * total) * 0.044715f) * 1.5957691216057308f;
                const float out = total * sigmoid(product);
                out_pack[lane] = out;
            }
            store_pack(out_ptr + (row * out_stride0 + first), out_pack);
        }
    }
}
