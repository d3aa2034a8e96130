${enable}
// Product for many operand rows, bound by arithmetic: TILE_M x 128 outputs a workgroup, 8 x 8 a thread.
//
// Tiles of both factors go through workgroup memory as f32; the next pair of tiles is fetched into registers
// while the current one is multiplied. The grid's x and y enumerate the tiles, z splits k.
// Needs k % 16 == 0 and n % 128 == 0, and a grid with no empty split.
${params}
${storage}
const TILE_M = ${tile_m}u;
const TILE_N = 128u;
const TILE_K = 16u;
const UNROLL = ${unroll}u;
const THREADS = ${threads}u;
const ROW_TILES_TOGETHER = 16u;
const PITCH_A = TILE_M / 4u + 1u; // one more, against bank conflicts
const PITCH_B = TILE_N / 4u;

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> operand: array<u32>; // (m, k / 2) pairs of f16
@group(0) @binding(2) var<storage, read> weight: array<Pack8>; // (k, n / 8)
@group(0) @binding(3) var<storage, read_write> out: array<vec4<f32>>; // (splits, m, gemm_stride)

var<workgroup> tile_a: array<vec4<f32>, ${scratch_a}>; // (TILE_K, PITCH_A) of four rows each
var<workgroup> tile_b: array<vec4<f32>, ${scratch_b}>; // (TILE_K, PITCH_B) of four columns each

// Rows beyond the last repeat it; they are not written.
fn operand_pair(row: u32, pair: u32) -> u32 {
    return operand[min(row, p.m - 1u) * (p.k / 2u) + pair];
}

fn operand_pairs(row: u32, pair: u32) -> vec4<u32> {
    return vec4<u32>(
        operand_pair(row, pair),
        operand_pair(row + 1u, pair),
        operand_pair(row + 2u, pair),
        operand_pair(row + 3u, pair),
    );
}

fn stage_operand(pairs: vec4<u32>, quad: u32, pair: u32) {
    let v0 = unpack2x16float(pairs.x);
    let v1 = unpack2x16float(pairs.y);
    let v2 = unpack2x16float(pairs.z);
    let v3 = unpack2x16float(pairs.w);
    tile_a[(2u * pair) * PITCH_A + quad] = vec4<f32>(v0.x, v1.x, v2.x, v3.x);
    tile_a[(2u * pair + 1u) * PITCH_A + quad] = vec4<f32>(v0.y, v1.y, v2.y, v3.y);
}

fn stage_weights(pack: Pack8, item: u32) {
    let at = (item / (TILE_N / 8u)) * PITCH_B + 2u * (item % (TILE_N / 8u));
    tile_b[at] = widen(low(pack));
    tile_b[at + 1u] = widen(high(pack));
}

// Where item `item` of the weight tile at (k, pack column) lies.
fn weight_at(k: u32, first_pack: u32, item: u32) -> u32 {
    return (k + item / (TILE_N / 8u)) * (p.n / 8u) + first_pack + item % (TILE_N / 8u);
}

fn write_row(row: u32, split: u32, vector: u32, left: vec4<f32>, right: vec4<f32>) {
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
    let quad = thread / (TILE_K / 2u);
    let pair = thread % (TILE_K / 2u);

${declare_sums}
    var next_operand = operand_pairs(m0 + quad * 4u, first_step * (TILE_K / 2u) + pair);
${first_weights}

    for (var step = first_step; step < end_step; step++) {
        workgroupBarrier();
        stage_operand(next_operand, quad, pair);
${stage_weights}
        workgroupBarrier();
        if (step + 1u < end_step) {
            next_operand = operand_pairs(m0 + quad * 4u, (step + 1u) * (TILE_K / 2u) + pair);
${next_weights}
        }
        for (var k = 0u; k < TILE_K; k += UNROLL) {
${multiply}
        }
    }

    let vector = n0 / 4u + tx;
${write_sums}
}
