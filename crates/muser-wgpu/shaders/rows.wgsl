// Sums over a row in the order of all norms (`arith::row_sums`): runs of 8 values ascending, 32 runs as a tree, 32 blocks of 256
// values as a tree. A workgroup of 256 takes eight blocks at a time; four sums go side by side. Rows of up to 8192 values.
var<workgroup> row_runs: array<vec4<f32>, 256>;
var<workgroup> row_blocks: array<vec4<f32>, 32>;

fn add4(a: vec4<f32>, b: vec4<f32>) -> vec4<f32> {
  return vec4(add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w));
}

fn row_sums(row: u32, len: u32, i: u32) -> vec4<f32> {
  if (i < 32u) { row_blocks[i] = vec4(nothing()); }
  for (var start = 0u; start < len; start += 2048u) {
    var sums = vec4(nothing());
    for (var k = 0u; k < 8u; k++) {
      let at = start + i * 8u + k;
      if (at < len) { sums = row_term(row, at, sums); }
    }
    row_runs[i] = sums;
    workgroupBarrier();
    for (var step = 16u; step > 0u; step = step >> 1u) {
      if (i % 32u < step) { row_runs[i] = add4(row_runs[i], row_runs[i + step]); }
      workgroupBarrier();
    }
    let block = start / 256u + i / 32u;
    if (i % 32u == 0u && block < 32u) { row_blocks[block] = row_runs[i]; }
    workgroupBarrier();
  }
  for (var step = 16u; step > 0u; step = step >> 1u) {
    if (i < step) { row_blocks[i] = add4(row_blocks[i], row_blocks[i + step]); }
    workgroupBarrier();
  }
  return add4(vec4(nothing()), row_blocks[0]);
}
