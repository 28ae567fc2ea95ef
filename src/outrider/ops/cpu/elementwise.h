// Norms, and the functions that follow a product. Every value of a row is computed by itself, in the same operations at every
// lane, so its bits depend neither on its place nor on its neighbours.
#pragma once

#include <cmath>

#include "simd.h"

namespace outrider {

// A norm over the values of a row; without weight there is none.
struct Norm {
    const float *weight = nullptr, *bias = nullptr;
    int64_t layer = 0;  // the mean is subtracted first
    double eps = 0.0;

    // The norm of values that have its weights from `at` on.
    Norm from(size_t at) const { return {weight + at, bias ? bias + at : nullptr, layer, eps}; }
};

// A norm for one row: (x - mean) * inverse * weight + bias. The row may lie in several runs of `width` values.
class RowNorm {
   public:
    RowNorm(const Norm& n, const float* x, int width, int runs = 1, size_t stride = 0)
        : weight(n.weight), bias(n.bias), mean(splat(0.0f)), inverse(mean) {
        if (!weight) return;
        const float count = static_cast<float>(width) * static_cast<float>(runs);
        const auto total = [&](float fill, const auto& add) {
            f32x16 lanes = splat(0.0f);
            for (int run = 0; run < runs; run++)
                for (int i = 0; i < width; i += kLanes) lanes = add(load_upto(x + run * stride + i, width - i, fill), lanes);
            return sum(lanes) / count;
        };
        const float centre = n.layer ? total(0.0f, [](f32x16 v, f32x16 lanes) { return lanes + v; }) : 0.0f;
        mean = splat(centre);
        const float squares = total(centre, [&](f32x16 v, f32x16 lanes) { return fma(v - mean, v - mean, lanes); });
        inverse = splat(1.0f / std::sqrt(squares + static_cast<float>(n.eps)));
    }

    explicit operator bool() const { return weight; }
    // At most sixteen values that have the weights from `at` on.
    f32x16 operator()(f32x16 x, int at, int left) const {
        const f32x16 scaled = (x - mean) * inverse * load_upto(weight + at, left);
        return bias ? scaled + load_upto(bias + at, left) : scaled;
    }
    void operator()(float* to, const float* x, int width, int at = 0) const {
        for (int i = 0; i < width; i += kLanes)
            store_upto(to + i, (*this)(load_upto(x + i, width - i), at + i, width - i), width - i);
    }

   private:
    const float *weight, *bias;
    f32x16 mean, inverse;
};

inline void normed(float* to, const float* x, const Norm& norm, int width) { RowNorm(norm, x, width)(to, x, width); }

// tanh to within a few units in the last place: a polynomial about zero, else (1 - e^-2|x|) / (1 + e^-2|x|).
inline f32x16 hyperbolic_tangent(f32x16 x) {
    const f32x16 one = splat(1.0f), size = magnitude(x), square = x * x;
    f32x16 p = splat(-0.00590586836f);
    for (float c : {0.0208053845f, -0.0537866836f, 0.133319582f, -0.333332993f}) p = fma(p, square, splat(c));
    const f32x16 e = exponential(size * splat(-2.0f)), large = (one - e) / (one + e);
    const f32x16 signed_large = as_float(as_words(large) ^ (as_words(x) & splat_word(0x80000000u)));
    return where_less(size, splat(0.6f), fma(p * square, x, x), signed_large);
}

// x * P(X < x) for a normal X: max(x, 0) less |x| times the chance of the tail beyond |x|, which is e^(-x^2 / 2) times a
// polynomial in 1 / (1 + |x| / 4), exact to 5e-9.
inline f32x16 gelu(f32x16 x) {
    const f32x16 size = magnitude(x), t = splat(1.0f) / fma(size, splat(0.25f), splat(1.0f));
    f32x16 p = splat(-0.0914415046f);
    for (float c : {0.340216908f, -0.262840098f, 0.275176603f, 0.0293702414f, 0.110422453f, 0.0990953926f})
        p = fma(p, t, splat(c));
    return maximum(splat(0.0f), x) - size * (exponential(x * x * splat(-0.5f)) * t * p);
}

// x / (1 + e^y)
inline f32x16 sigmoid_share(f32x16 x, f32x16 y) { return x / (splat(1.0f) + exponential(y)); }
inline f32x16 silu(f32x16 x) { return sigmoid_share(x, splat(0.0f) - x); }

inline f32x16 soft_capped(f32x16 x, float cap) { return hyperbolic_tangent(x / splat(cap)) * splat(cap); }

// What follows a product; ops/native.py has the same numbers.
enum class Function : int64_t { kNone, kScale, kCap, kSilu, kGelu, kGeluTanh, kRelu, kRelu2, kClamped };

struct Epilogue {
    Function function;
    double factor, cap;  // of kScale and kCap: y * factor, and cap * tanh of that / cap; of kClamped: alpha and the limit
};

// The columns that a gate multiplies.
inline f32x16 of_up(const Epilogue& e, f32x16 up) {
    if (e.function != Function::kClamped) return up;
    const auto limit = static_cast<float>(e.cap);
    return maximum(splat(-limit), minimum(splat(limit), up)) + splat(1.0f);
}

// Not inlined: it is called once for the results of several rows over sixteen columns.
__attribute__((noinline)) inline void apply(const Epilogue& e, float (*y)[kLanes], int rows) {
    const auto all = [&](const auto& f) {
        for (int r = 0; r < rows; r++) store(y[r], f(load(y[r])));
    };
    const auto factor = static_cast<float>(e.factor), cap = static_cast<float>(e.cap);
    const f32x16 zero = splat(0.0f);
    switch (e.function) {
        case Function::kNone: return;
        case Function::kScale: return all([&](f32x16 x) { return x * splat(factor); });
        case Function::kCap: return all([&](f32x16 x) { return soft_capped(x * splat(factor), cap); });
        case Function::kSilu: return all(silu);
        case Function::kGelu: return all(gelu);
        case Function::kGeluTanh:  // x * (1 + tanh(u)) / 2 is x / (1 + e^-2u)
            return all([](f32x16 x) {
                return sigmoid_share(x, x * fma(x * x, splat(-2 * 0.7978845608f * 0.044715f), splat(-2 * 0.7978845608f)));
            });
        case Function::kRelu: return all([&](f32x16 x) { return maximum(zero, x); });
        case Function::kClamped:
            return all([&](f32x16 x) {
                const f32x16 gate = minimum(splat(cap), x);
                return sigmoid_share(gate, gate * splat(-factor));
            });
        case Function::kRelu2:
            return all([&](f32x16 x) {
                const f32x16 positive = maximum(zero, x);
                return positive * positive;
            });
    }
}

}  // namespace outrider
