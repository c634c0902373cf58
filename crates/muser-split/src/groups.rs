//! How the rows of a step are cut into groups that follow each other through the parts. No cut changes a bit of the result.

use std::ops::Range;

use muser_backend::StepBatch;

/// Inside a sequence groups begin at multiples of this, so that products take whole tiles of rows.
const TILE: usize = 16;

/// Cuts the rows of `batch` into at most `count` groups of about the same size, between sequences where one ends near the place.
pub(crate) fn cut(batch: &StepBatch, count: usize, groups: &mut Vec<Range<usize>>) {
    groups.clear();
    let rows = batch.rows().len();
    let mut from = 0;
    for i in 1..=count {
        let to = if i == count { rows } else { near(batch, rows * i / count, rows / count / 2) };
        if to > from {
            groups.push(from..to);
            from = to;
        }
    }
}

/// The end of a sequence that is at most `slack` rows away, else a whole tile inside.
fn near(batch: &StepBatch, row: usize, slack: usize) -> usize {
    let ends = batch.seqs().iter().map(|seq| (seq.first_row + seq.n_rows) as usize);
    let nearest = ends.filter(|end| end.abs_diff(row) <= slack).min_by_key(|end| end.abs_diff(row));
    nearest.unwrap_or(if row > TILE { row / TILE * TILE } else { row })
}

#[cfg(test)]
mod tests {
    use muser_backend::{Row, RowInput, RowWants};

    use super::*;

    fn cut_of(sequences: &[usize], count: usize) -> Vec<usize> {
        let mut batch = StepBatch::default();
        for &rows in sequences {
            batch.push_seq(0, &[], 0, &[]);
            (0..rows).for_each(|_| {
                batch.push_row(Row { input: RowInput::Token(0), wants: RowWants::default() });
            });
        }
        let mut groups = vec![3..4, 4..7];
        cut(&batch, count, &mut groups);
        let mut next = 0;
        for group in &groups {
            assert!(group.start == next && !group.is_empty(), "{groups:?}");
            next = group.end;
        }
        assert_eq!(next, sequences.iter().sum::<usize>(), "every row once: {groups:?}");
        assert!(groups.len() <= count);
        groups.into_iter().map(|group| group.len()).collect()
    }

    #[test]
    fn sequences_stay_together_where_that_is_about_as_good() {
        assert_eq!(cut_of(&[1; 8], 2), [4, 4]);
        assert_eq!(cut_of(&[1; 3], 2), [1, 2]);
        assert_eq!(cut_of(&[5, 5, 5, 5], 2), [10, 10]);
        assert_eq!(cut_of(&[7, 13], 2), [7, 13]);
        assert_eq!(cut_of(&[1], 4), [1]);
        assert_eq!(cut_of(&[1, 1], 8), [1, 1]);
    }

    #[test]
    fn long_prompts_are_cut_inside_at_whole_tiles() {
        assert_eq!(cut_of(&[512], 4), [128, 128, 128, 128]);
        assert_eq!(cut_of(&[500], 4), [112, 128, 128, 132]);
        assert_eq!(cut_of(&[1, 1, 1, 509], 2), [256, 256]);
        for rows in 1..70 {
            for count in 1..9 {
                cut_of(&[rows], count);
                cut_of(&[rows, 3, 1], count);
            }
        }
    }
}
