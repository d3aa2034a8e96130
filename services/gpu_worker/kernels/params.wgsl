// Sizes are in elements and already padded; strides and columns of the outputs are in vec4<f32>.
struct Params {
    m: u32,
    k: u32,
    n: u32,
    splits: u32,
    gemm_stride: u32,
    gemm_column: u32,
    result_stride: u32,
    result_column: u32,
}
