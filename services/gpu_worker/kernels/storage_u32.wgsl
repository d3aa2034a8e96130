// Weights as u32, two f16 values each: for adapters without the shader-f16 feature.
alias Pack8 = vec4<u32>;
alias Pack4 = vec2<u32>;

fn low(pack: Pack8) -> Pack4 {
    return pack.xy;
}

fn high(pack: Pack8) -> Pack4 {
    return pack.zw;
}

fn widen(pack: Pack4) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(pack.x), unpack2x16float(pack.y));
}
