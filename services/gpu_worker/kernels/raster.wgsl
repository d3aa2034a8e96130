    // Which tile this workgroup computes, (m0, n0), and which steps of k: part of a kernel's main. Workgroups in
    // flight together share rows and columns through the cache: they walk ROW_TILES_TOGETHER row tiles first.
    let row_tiles = (p.m + TILE_M - 1u) / TILE_M;
    let column_tiles = p.n / TILE_N;
    let index = group.y * groups.x + group.x;
    if (index >= row_tiles * column_tiles) {
        return;
    }
    let band = index / (ROW_TILES_TOGETHER * column_tiles);
    let within = index - band * ROW_TILES_TOGETHER * column_tiles;
    let band_rows = min(ROW_TILES_TOGETHER, row_tiles - band * ROW_TILES_TOGETHER);
    let m0 = (band * ROW_TILES_TOGETHER + within % band_rows) * TILE_M;
    let n0 = (within / band_rows) * TILE_N;

    let steps = p.k / TILE_K;
    let per_split = (steps + p.splits - 1u) / p.splits;
    let first_step = group.z * per_split;
    let end_step = min(steps, first_step + per_split);
