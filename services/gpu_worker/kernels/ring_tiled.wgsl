// Product modulo 2^32 for many operand rows, bound by arithmetic: TILE_M x 128 outputs a workgroup, 8 x 8 a
// thread.
//
// Tiles of both factors go through workgroup memory, the weights as packed bytes; the next pair of tiles is
// fetched into registers while the current one is multiplied. The grid's x and y enumerate the tiles, z splits
// k. Needs k % 16 == 0 and n % 128 == 0, and a grid with no empty split.
${params}
const TILE_M = ${tile_m}u;
const TILE_N = 128u;
const TILE_K = 16u;
const ROW_TILES_TOGETHER = 16u;
const PITCH_A = TILE_M / 4u + 1u; // one more, against bank conflicts
const PITCH_B = TILE_N / 4u;
const WEIGHTS = TILE_K / 4u * PITCH_B;

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> operand: array<u32>; // (m, k)
// (k / 4, n / 4): component j holds four columns, a byte each, at k % 4 = j.
@group(0) @binding(2) var<storage, read> weight: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> out: array<vec4<u32>>; // (splits, m, gemm_stride)

var<workgroup> tile_a: array<vec4<u32>, ${scratch_a}>; // (TILE_K, PITCH_A) of four rows each
var<workgroup> tile_b: array<vec4<u32>, ${scratch_b}>; // (TILE_K / 4, PITCH_B) as the weights

fn widen(word: u32) -> vec4<u32> {
    return vec4<u32>(unpack4xI8(word));
}

// Rows beyond the last repeat it; they are not written.
fn operand_rows(row: u32, k: u32) -> vec4<u32> {
    let last = p.m - 1u;
    return vec4<u32>(
        operand[min(row, last) * p.k + k],
        operand[min(row + 1u, last) * p.k + k],
        operand[min(row + 2u, last) * p.k + k],
        operand[min(row + 3u, last) * p.k + k],
    );
}

fn write_row(row: u32, split: u32, vector: u32, left: vec4<u32>, right: vec4<u32>) {
    if (row < p.m) {
        let at = (split * p.m + row) * p.gemm_stride + p.gemm_column + vector;
        out[at] = left;
        out[at + TILE_N / 8u] = right;
    }
}

@compute @workgroup_size(${threads})
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
${raster}
    let tx = thread % (TILE_N / 8u);
    let ty = thread / (TILE_N / 8u);
    let quad = thread / TILE_K;
    let k = thread % TILE_K;
    // Where this thread's weights lie within a step's; a tile has no more than 128 vectors.
    let weight_item = thread % WEIGHTS;
    let weight_at = weight_item / PITCH_B * (p.n / 4u) + n0 / 4u + weight_item % PITCH_B;

${declare_sums}
${declare_operand}
    var next_w = vec4<u32>(0u);
    {
        let k0 = first_step * TILE_K;
${fetch_operand}
        next_w = weight[k0 / 4u * (p.n / 4u) + weight_at];
    }

    for (var step = first_step; step < end_step; step++) {
        workgroupBarrier();
${stage_operand}
        if (thread < WEIGHTS) {
            tile_b[weight_item] = next_w;
        }
        workgroupBarrier();
        if (step + 1u < end_step) {
            let k0 = (step + 1u) * TILE_K;
${fetch_operand}
            if (thread < WEIGHTS) {
                next_w = weight[k0 / 4u * (p.n / 4u) + weight_at];
            }
        }
        for (var quad_k = 0u; quad_k < TILE_K / 4u; quad_k++) {
            let w0 = tile_b[quad_k * PITCH_B + tx];
            let w1 = tile_b[quad_k * PITCH_B + tx + TILE_N / 8u];
${multiply}
        }
    }

    let vector = n0 / 4u + tx;
${write_sums}
}
