// Adds the splits of a split-K product; ${number} wraps if it is u32.
${params}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> partial: array<vec4<${number}>>; // (splits, m, n / 4)
@group(0) @binding(2) var<storage, read_write> result: array<vec4<${number}>>; // (m, result_stride)

@compute @workgroup_size(${threads})
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let vectors = p.n / 4u;
    let total = p.m * vectors;
    let item = (group.y * groups.x + group.x) * ${threads}u + thread;
    if (item >= total) {
        return;
    }
    var sum = partial[item];
    for (var split = 1u; split < p.splits; split++) {
        sum += partial[split * total + item];
    }
    result[(item / vectors) * p.result_stride + p.result_column + item % vectors] = sum;
}
