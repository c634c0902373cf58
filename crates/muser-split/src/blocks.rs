//! A block of the whole model, whose pieces lie with the parts.

use muser_backend::{ExecError, LentBlock};

/// Refuses a copy of another length than a block's.
pub(crate) fn check(len: usize, sizes: &[usize]) -> Result<(), ExecError> {
    let expected: usize = sizes.iter().sum();
    if len == expected {
        return Ok(());
    }
    Err(ExecError::InvalidBatch(format!("copy of {len} bytes, a block has {expected}")))
}

/// The loans of all parts. The borrower fills memory that lies in one piece, of which each part gets its own when the loan comes
/// back.
pub(crate) struct SplitLoan {
    pieces: Vec<Box<dyn LentBlock>>,
    /// Made when it is asked for.
    whole: Option<Vec<u8>>,
}

impl SplitLoan {
    pub(crate) fn new(pieces: Vec<Box<dyn LentBlock>>) -> Self {
        Self { pieces, whole: None }
    }
}

impl LentBlock for SplitLoan {
    fn bytes(&mut self) -> &mut [u8] {
        let Self { pieces, whole } = self;
        whole.get_or_insert_with(|| pieces.iter_mut().flat_map(|piece| piece.bytes().to_vec()).collect())
    }
}

impl Drop for SplitLoan {
    fn drop(&mut self) {
        let Some(whole) = &self.whole else { return };
        let mut rest = &whole[..];
        for piece in &mut self.pieces {
            let to = piece.bytes();
            let (own, others) = rest.split_at(to.len());
            to.copy_from_slice(own);
            rest = others;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    struct Piece(Vec<u8>, Arc<Mutex<Vec<Vec<u8>>>>);

    impl LentBlock for Piece {
        fn bytes(&mut self) -> &mut [u8] {
            &mut self.0
        }
    }

    impl Drop for Piece {
        fn drop(&mut self) {
            self.1.lock().expect("not poisoned").push(std::mem::take(&mut self.0));
        }
    }

    fn lend(fill: impl FnOnce(&mut SplitLoan)) -> Vec<Vec<u8>> {
        let back = Arc::default();
        let piece = |bytes: &[u8]| -> Box<dyn LentBlock> { Box::new(Piece(bytes.into(), Arc::clone(&back))) };
        let mut loan = SplitLoan::new(vec![piece(&[1, 2]), piece(&[]), piece(&[3])]);
        fill(&mut loan);
        drop(loan);
        back.lock().expect("not poisoned").clone()
    }

    #[test]
    fn pieces_are_one_block_while_they_are_lent() {
        let seen = lend(|loan| {
            assert_eq!(loan.bytes(), [1, 2, 3], "what was there");
            loan.bytes()[1..].fill(9);
        });
        assert_eq!(seen, [vec![1, 9], vec![], vec![9]]);
        assert_eq!(lend(|_| ()), [vec![1, 2], vec![], vec![3]], "untouched");
    }
}
