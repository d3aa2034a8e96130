// Product modulo 2^32 for at most ROWS operand rows: each weight is read exactly once.
//
// A thread keeps ROWS x 4 sums in registers. The SLICES slices of a workgroup share its 128 columns and each
// takes its part of every chunk of k; workgroups along y share the columns and split the chunks (split-K).
// The next chunk of weights and operand is fetched into registers while the current one is multiplied.
// Needs k % 4 == 0 and n % 128 == 0, and a grid with no empty split.
${params}
const ROWS = ${rows}u;
const SLICES = ${slices}u;
const LANES = ${lanes}u;
const UNROLL = ${unroll}u;
const CHUNK_QUADS = SLICES * UNROLL;
const EXCHANGED = ${exchanged}u;
const THREADS = LANES * SLICES;

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> operand: array<vec4<u32>>; // (m, k / 4)
// (k / 4, n / 4): component j holds four columns, a byte each, at k % 4 = j.
@group(0) @binding(2) var<storage, read> weight: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> out: array<vec4<u32>>; // (splits, m, gemm_stride)

// Twice an operand chunk as (ROWS, CHUNK_QUADS), then the slices' partial sums.
var<workgroup> scratch: array<vec4<u32>, ${scratch}>;

fn widen(word: u32) -> vec4<u32> {
    return vec4<u32>(unpack4xI8(word));
}

// Rows beyond the last repeat it; they are not written. Zeros beyond the end of k.
fn operand_item(item: u32, chunk: u32) -> vec4<u32> {
    let quads = p.k / 4u;
    let quad = chunk * CHUNK_QUADS + item % CHUNK_QUADS;
    let row = min(item / CHUNK_QUADS, p.m - 1u);
    let value = operand[row * quads + min(quad, quads - 1u)];
    return select(vec4<u32>(0u), value, quad < quads);
}

fn stage_operand(value: vec4<u32>, item: u32, at: u32) {
    if (item < ROWS * CHUNK_QUADS) {
        scratch[at + item] = value;
    }
}

// Adds the slices of EXCHANGED rows, which lie in `scratch` as (EXCHANGED, SLICES, LANES).
fn write_rows(first_row: u32, split: u32, first_vector: u32, thread: u32) {
    for (var item = thread; item < EXCHANGED * LANES; item += THREADS) {
        let lane = item % LANES;
        let row = item / LANES;
        var sum = scratch[row * SLICES * LANES + lane];
        for (var slice = 1u; slice < SLICES; slice++) {
            sum += scratch[(row * SLICES + slice) * LANES + lane];
        }
        if (first_row + row < p.m) {
            let at = (split * p.m + first_row + row) * p.gemm_stride + p.gemm_column;
            out[at + first_vector + lane] = sum;
        }
    }
}

@compute @workgroup_size(${threads})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let lane = thread % LANES;
    let slice = thread / LANES;
    let vectors = p.n / 4u;
    let vector = group.x * LANES + lane;
    let last_quad = p.k / 4u - 1u;
    let chunks = (last_quad + CHUNK_QUADS) / CHUNK_QUADS;
    let per_split = (chunks + p.splits - 1u) / p.splits;
    let first_chunk = group.y * per_split;
    let end_chunk = min(chunks, first_chunk + per_split);

${declare_sums}
${declare_operand}
${declare_weights}
    {
        let following = first_chunk;
        let first_quad = following * CHUNK_QUADS + slice * UNROLL;
${fetch_operand}
${fetch_weights}
    }
    for (var chunk = first_chunk; chunk < end_chunk; chunk++) {
        // Each half of the scratch is written two chunks after it was read, with a barrier between.
        let half = (chunk % 2u) * ROWS * CHUNK_QUADS;
        {
            let at = half;
${stage_operand}
        }
${take_weights}
        workgroupBarrier();
        if (chunk + 1u < end_chunk) {
            let following = chunk + 1u;
            let first_quad = following * CHUNK_QUADS + slice * UNROLL;
${fetch_operand}
${fetch_weights}
        }
        let at = half + slice * UNROLL;
${multiply}
    }

${write_sums}
}
