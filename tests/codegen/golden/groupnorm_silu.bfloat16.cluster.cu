// groupnorm_silu: normalise groups of channels and SiLU; a group's channels are read as one row
//
// Moves each operand once: x 2 B/element; weight 2 B/part of a row, the same for every i0; bias 2 B/part of a
// row, the same for every i0; out 2 B/element.
// Maths in float32, rounded once, at the store.
// Tuning: cluster=4
// Origin: library kernel groupnorm_silu, variant builtin.
// Source: https://arxiv.org/abs/1803.08494

#ifndef THREADS
#define THREADS 256  // threads along a row
#endif
#ifndef CLUSTER
#define CLUSTER 4  // blocks along a row, a cluster: compute capability 9.0 or later
#endif
#ifndef PACKS
#define PACKS 4  // packs of a thread: CLUSTER * PACKS * THREADS * VEC >= cols
#endif
#ifndef VEC
#define VEC 8  // columns of a pack, a divisor of every row and stride
#endif
#ifndef FULL
#define FULL 0  // 1 where CLUSTER * PACKS * THREADS * VEC divides cols
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

// Rounded as IEEE division rounds, by Markstein (1990): the product with the reciprocal, which is a constant where the launch knows
// the count, and a correction by what it leaves over. The division itself is 14 instructions and a call.
__device__ __forceinline__ float mean_of(float total, float count) {
    const float inverse = 1.0f / count, mean = __fmul_rn(total, inverse);  // no fused difference may take it unrounded
    const float rounded = fmaf(fmaf(-mean, count, total), inverse, mean);
    return mean - mean == 0.0f ? rounded : mean;  // infinity leaves NaN over
}

// One for each number that a cluster's blocks exchange: complete when all its bytes have come.
__shared__ unsigned long long arrivals[2];

__device__ __forceinline__ unsigned shared_address(const void* place) { return (unsigned)__cvta_generic_to_shared(place); }

// The blocks of a cluster start together, but no one's barriers are ready before it says so.
__device__ __forceinline__ void cluster_start() {
    if (threadIdx.x == 0) {
        for (int n = 0; n < 2; ++n)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(&arrivals[n])) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Writes to the same place of another block's shared memory; the barrier there counts the bytes.
template <typename T>
__device__ __forceinline__ void send(T* place, T value, unsigned long long* arrival, unsigned block) {
    unsigned there, barrier;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(place)), "r"(block));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(shared_address(arrival)), "r"(block));
    if constexpr (sizeof(T) == 4)
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                     :: "r"(there), "r"(reinterpret_cast<const unsigned&>(value)), "r"(barrier) : "memory");
    else
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];"
                     :: "r"(there), "l"(reinterpret_cast<const unsigned long long&>(value)), "r"(barrier) : "memory");
}
__device__ __forceinline__ void expect(unsigned long long* arrival, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(arrival)), "r"(bytes) : "memory");
}
// What was sent lies in the block's own shared memory: to acquire it at the cluster's scope would only empty the L1 cache.
__device__ __forceinline__ void receive(unsigned long long* arrival) {
    unsigned is_complete;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.b32 %0, 1, 0, p; }"
                     : "=r"(is_complete) : "r"(shared_address(arrival)) : "memory");
    } while (!is_complete);
}

struct Sum {
    template <typename T>
    __device__ T operator()(T a, T b) const { return a + b; }
    template <typename T>
    __device__ T neutral(T) const { return T(0); }
};

// Combines one number per thread over the threads of all blocks that share a row; every thread gets the result, the same in all.
// Each warp sends its own to every block. Each call has its own number, and with it its own shared memory: no reader of an earlier
// one has to be waited for. No block ends before all that is sent to it has come.
template <typename Combine, int NUMBER, typename T>
__device__ __forceinline__ T row_reduce(T value) {
    const Combine combine;
    #pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
    constexpr int warps = THREADS / 32, partials = CLUSTER * warps;
    __shared__ T partial[partials];
    const int lane = threadIdx.x % 32, own = (int)(blockIdx.x % CLUSTER) * warps + threadIdx.x / 32;
    if (NUMBER == 0) cluster_wait();
    if (threadIdx.x == 0) expect(&arrivals[NUMBER], sizeof(partial));
    if (lane < CLUSTER) send(&partial[own], value, &arrivals[NUMBER], lane);
    receive(&arrivals[NUMBER]);
    value = combine.neutral(value);
    #pragma unroll
    for (int n = 0; n < partials; n += 32)
        if (n + lane < partials) value = combine(value, partial[n + lane]);
    #pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
    return value;
}

// ---- kernel ----

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS)
fa_groupnorm_silu_a63ce4(
    const bfloat16_bits* __restrict__ x_ptr,
    const bfloat16_bits* __restrict__ weight_ptr,
    const bfloat16_bits* __restrict__ bias_ptr,
    bfloat16_bits* __restrict__ out_ptr,
    index_t rows,
    index_t size1,
    index_t cols,
    index_t x_stride0,
    index_t x_stride1,
    index_t weight_extent,
    index_t weight_stride1,
    index_t bias_stride1,
    index_t out_stride0,
    index_t out_stride1) {
#ifdef SIZE1
    __builtin_assume(size1 == SIZE1);  // dividing by what is known takes a few instructions, not twenty
#endif
#ifdef WEIGHT_EXTENT
    __builtin_assume(weight_extent == WEIGHT_EXTENT);
#endif
    const index_t row = (index_t)blockIdx.x / CLUSTER;
    if (FULL) __builtin_assume(cols == CLUSTER * PACKS * THREADS * VEC);  // a mean then takes no division
    const index_t begin = (index_t)blockIdx.x % CLUSTER * (PACKS * THREADS * VEC);
    cluster_start();
    const index_t i1 = row % size1;
    const index_t i0 = row / size1;
    const bfloat16_bits* const x_row = x_ptr + i0 * x_stride0 + i1 * x_stride1;
    bfloat16_bits* const out_row = out_ptr + i0 * out_stride0 + i1 * out_stride1;
    const float eps = 1e-05f;
    Pack<bfloat16_bits> x_packs[PACKS];
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = begin + ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        x_packs[p] = load_pack(x_row + first, is_inside);
    }
    float weight_of[PACKS];
    float bias_of[PACKS];
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = begin + ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        const index_t part = first / weight_extent;
        weight_of[p] = is_inside ? to_float32(weight_ptr[part + i1 * weight_stride1]) : 0;
        bias_of[p] = is_inside ? to_float32(bias_ptr[part + i1 * bias_stride1]) : 0;
    }

    float x_sum_part = 0;
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = begin + ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float x = to_float32(x_packs[p], lane);
            x_sum_part += x;
        }
    }
    const float x_sum = row_reduce<Sum, 0>(x_sum_part);
    const float x_mean = mean_of(x_sum, (float)cols);

    float x_centered_squared_sum_part = 0;
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = begin + ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float x = to_float32(x_packs[p], lane);
            const float x_centered = x - x_mean;
            x_centered_squared_sum_part += x_centered * x_centered;
        }
    }
    const float x_centered_squared_sum = row_reduce<Sum, 1>(x_centered_squared_sum_part);
    const float x_variance_eps = mean_of(x_centered_squared_sum, (float)cols) + eps;
    const float inverse_deviation = rsqrtf(x_variance_eps);

    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = begin + ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        Pack<bfloat16_bits> out_pack;
        const float weight = weight_of[p];
        const float bias = bias_of[p];
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float x = to_float32(x_packs[p], lane);
            const float x_centered = x - x_mean;
            const float total = x_centered * (inverse_deviation * weight) + bias;
            const float out = total * sigmoid_16bit(total);
            out_pack[lane] = from_float32<bfloat16_bits>(out);
        }
        store_pack(out_row + first, out_pack);
    }
}
