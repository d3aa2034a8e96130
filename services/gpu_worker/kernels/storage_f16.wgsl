// Weights as native f16. naga has no bitcast from u32 to vec2<f16>, so eight values are two vec4<f16>.
struct Pack8 {
    lo: vec4<f16>,
    hi: vec4<f16>,
}
alias Pack4 = vec4<f16>;

fn low(pack: Pack8) -> Pack4 {
    return pack.lo;
}

fn high(pack: Pack8) -> Pack4 {
    return pack.hi;
}

fn widen(pack: Pack4) -> vec4<f32> {
    return vec4<f32>(pack);
}
