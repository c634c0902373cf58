//! Reading memory as fast as it comes.

use crate::simd::Simd;

/// Adds up `len` bytes (a multiple of 1024) and returns something that depends on all of them.
///
/// # Safety
/// `bytes` is readable for `len`.
#[inline(always)]
pub(crate) unsafe fn read_pass<S: Simd>(bytes: *const u8, len: usize) -> u64 {
    let mut acc = [S::i_splat(0); 8];
    let step = 8 * 4 * S::N;
    let mut at = 0;
    while at + step <= len {
        for (i, acc) in acc.iter_mut().enumerate() {
            let p = bytes.add(at + i * 4 * S::N);
            *acc = S::i_add(*acc, S::i_load(p));
            S::prefetch(p.wrapping_add(4096));
        }
        at += step;
    }
    let mut sum = 0u64;
    for acc in acc {
        let mut lanes = [0i32; 16];
        S::i_store(lanes.as_mut_ptr().cast(), acc);
        sum = lanes.iter().fold(sum, |s, &l| s.wrapping_add(l as u64));
    }
    sum
}
