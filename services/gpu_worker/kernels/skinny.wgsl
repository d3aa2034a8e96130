${enable}
// Product for at most ROWS operand rows (4, 8 or 16), bound by reading the weights: each is read exactly once.
//
// A thread keeps ROWS x COLUMNS sums in registers. The SLICES slices of a workgroup share the columns and each
// takes its part of every chunk of k; workgroups along y share the columns and split the chunks (split-K).
// Needs k % CHUNK == 0 and n % COLUMNS == 0, and a grid with no empty split.
${params}
${storage}
const COLUMNS = ${columns}u;
const SLICES = ${slices}u;
const LANES = ${lanes}u;
const CHUNK = ${chunk}u;
const UNROLL = ${unroll}u;
const ROWS = ${rows}u;
const QUADS = ROWS / 4u;
const VECTORS = COLUMNS / 4u;
const THREADS = LANES * SLICES;

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> operand: array<u32>; // (m, k / 2) pairs of f16
@group(0) @binding(2) var<storage, read> weight: array<${pack}>; // (k, n / COLUMNS)
@group(0) @binding(3) var<storage, read_write> out: array<vec4<f32>>; // (splits, m, gemm_stride)

// Holds the operand chunk as (CHUNK, QUADS) of four rows each, then the slices' partial sums.
var<workgroup> scratch: array<vec4<f32>, ${scratch}>;

// Rows beyond the last repeat it; they are not written.
fn stage_operand(first_pair: u32, thread: u32) {
    let stride = p.k / 2u;
    let last_row = p.m - 1u;
    for (var item = thread; item < QUADS * CHUNK / 2u; item += THREADS) {
        let quad = item % QUADS;
        let pair = item / QUADS;
        let row = quad * 4u;
        let at = first_pair + pair;
        let v0 = unpack2x16float(operand[min(row, last_row) * stride + at]);
        let v1 = unpack2x16float(operand[min(row + 1u, last_row) * stride + at]);
        let v2 = unpack2x16float(operand[min(row + 2u, last_row) * stride + at]);
        let v3 = unpack2x16float(operand[min(row + 3u, last_row) * stride + at]);
        scratch[(2u * pair) * QUADS + quad] = vec4<f32>(v0.x, v1.x, v2.x, v3.x);
        scratch[(2u * pair + 1u) * QUADS + quad] = vec4<f32>(v0.y, v1.y, v2.y, v3.y);
    }
}

// Adds the slices of four rows, which lie in `scratch` as (SLICES, 4, LANES, VECTORS).
fn write_quad(quad: u32, split: u32, first_vector: u32, thread: u32) {
    const SPAN = 4u * LANES * VECTORS;
    for (var item = thread; item < SPAN; item += THREADS) {
        var sum = scratch[item];
        for (var slice = 1u; slice < SLICES; slice++) {
            sum += scratch[slice * SPAN + item];
        }
        let row = quad * 4u + item / (LANES * VECTORS);
        let vector = first_vector + item % (LANES * VECTORS);
        if (row < p.m && vector < p.n / 4u) {
            out[(split * p.m + row) * p.gemm_stride + p.gemm_column + vector] = sum;
        }
    }
}

@compute @workgroup_size(${threads})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let lane = thread % LANES;
    let slice = thread / LANES;
    let packs = p.n / COLUMNS;
    // Lanes beyond the last column repeat it, so that all threads reach the barriers; they write nothing.
    let pack = min(group.x * LANES + lane, packs - 1u);
    let chunks = p.k / CHUNK;
    let per_split = (chunks + p.splits - 1u) / p.splits;
    let first_chunk = group.y * per_split;
    let end_chunk = min(chunks, first_chunk + per_split);

${declare_sums}

    for (var chunk = first_chunk; chunk < end_chunk; chunk++) {
        workgroupBarrier();
        stage_operand(chunk * CHUNK / 2u, thread);
        workgroupBarrier();
        for (var step = 0u; step < CHUNK / SLICES; step += UNROLL) {
            let k = slice * (CHUNK / SLICES) + step;
            let at = (chunk * CHUNK + k) * packs + pack;
${load_weights}
${multiply}
        }
    }

${write_sums}
}
