/* The updates of torch's fused optimizers for one value, bit for bit: a product is rounded before it is added, except
   in `fmadd`. Include it below `#pragma GCC optimize("fp-contract=off")`. */
#pragma once

/* A fused multiply-add, rounded once. */
static inline float fmadd(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

/* The settings of an Adam step. `weight` is the weight of the gradient in the mean. */
struct adam {
    float sign, decay, weight, second, kept, root, eps, size;
};

static inline float mean_after(float mean, float gradient, const struct adam rule) {
    float difference = gradient - mean;
    return rule.weight < 0.5f ? fmadd(rule.weight, difference, mean) : fmadd(rule.weight - 1.0f, difference, gradient);
}

static inline float square_after(float square, float gradient, const struct adam rule) {
    return fmadd(rule.second * gradient, gradient, square * rule.kept);
}

static inline float adam(float parameter, float mean, float square, const struct adam rule) {
    float divisor = __builtin_sqrtf(square) / rule.root + rule.eps;
    return parameter * rule.decay + rule.size * mean / divisor;
}

/* The settings of an SGD step. */
struct sgd {
    float sign, momentum, share, size;
    int64_t is_nesterov;
};

static inline float momentum_after(float momentum, float gradient, const struct sgd rule) {
    return fmadd(rule.share, gradient, momentum * rule.momentum);
}

static inline float sgd(float parameter, float gradient, float momentum, const struct sgd rule) {
    float direction = rule.is_nesterov ? fmadd(momentum, rule.momentum, gradient) : momentum;
    return fmadd(direction, rule.size, parameter);
}
