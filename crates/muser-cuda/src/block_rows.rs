//! Where the rows of a KV block lie: `[layer][K: kv head, 256 positions, 128][V: kv head, 128, 256 positions]` in f16, the
//! layers of a draft behind those of the target (`kernels/rows.cu` and `kernels/draft.cu` write it).

use muser_kv::BLOCK_LEN;

/// Values of a head; all kernels are for this many.
const HEAD_DIM: usize = 128;
const HEAD_BYTES: usize = HEAD_DIM * BLOCK_LEN * 2;

/// Zeroes the rows from `rows` on; `kv_heads` are those of each layer.
pub(crate) fn clear(bytes: &mut [u8], rows: usize, kv_heads: impl Iterator<Item = usize>) {
    let rows = rows.min(BLOCK_LEN);
    let mut rest = bytes;
    for heads in kv_heads {
        let Some((layer, behind)) = rest.split_at_mut_checked(2 * heads * HEAD_BYTES) else { return };
        let (k, v) = layer.split_at_mut(heads * HEAD_BYTES);
        k.chunks_exact_mut(HEAD_BYTES).for_each(|head| head[rows * HEAD_DIM * 2..].fill(0));
        // V is transposed: a row is a column.
        v.chunks_exact_mut(BLOCK_LEN * 2).for_each(|positions| positions[rows * 2..].fill(0));
        rest = behind;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_behind_the_rows_is_zero_and_nothing_else() {
        // Two layers of the target with two heads, one of a draft with one.
        let heads = [2, 2, 1];
        let layer_at =
            |layer: usize| heads[..layer].iter().map(|heads| 2 * heads * HEAD_BYTES).sum::<usize>();
        let bytes = layer_at(3);
        for rows in [0, 1, 100, 255, 256] {
            let mut block = vec![0xAB_u8; bytes];
            clear(&mut block, rows, heads.into_iter());
            let value = |at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
            for (layer, &heads) in heads.iter().enumerate() {
                for head in 0..heads {
                    for dim in [0, 1, 127] {
                        for position in 0..BLOCK_LEN {
                            let expected = if position < rows { 0xABAB } else { 0 };
                            let k = layer_at(layer) + head * HEAD_BYTES + (position * HEAD_DIM + dim) * 2;
                            let v = layer_at(layer)
                                + (heads + head) * HEAD_BYTES
                                + (dim * BLOCK_LEN + position) * 2;
                            assert_eq!(
                                (value(k), value(v)),
                                (expected, expected),
                                "{layer} {head} {dim} {position}"
                            );
                        }
                    }
                }
            }
            let kept = block.iter().filter(|&&byte| byte != 0).count();
            assert_eq!(kept, bytes / BLOCK_LEN * rows, "{rows} rows");
        }
    }
}
