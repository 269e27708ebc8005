// The factor of a scale block of bf16 values, as precision/quantize.py defines it.

constexpr float FLOOR_BF16 = 1.0018652574217413e-12f;       // 1e-12 in bf16
constexpr float FACTOR_AT_FLOOR_BF16 = 447165923065856.0f;  // 448 / that

// 448 / max(amax, 1e-12) for values in bf16, whose floor is 1e-12 in bf16.
DEVICE float quantization_factor_bf16(float amax) {
    return amax <= FLOOR_BF16 ? FACTOR_AT_FLOOR_BF16 : __fdiv_rn(448.f, amax);
}
