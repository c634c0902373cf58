//! Bounds that kernels, which follow raw pointers, take on trust: how far a pointer reaches goes with it and is looked at once for
//! each row, tile or block. Only in builds with the feature `bounds`, which tests have: elsewhere a [`Reach`] takes no room and
//! nothing is looked at. (Debug assertions would also check every pointer that is read, with ten times the code.)

/// How many of something there are behind a pointer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reach(#[cfg(feature = "bounds")] usize);

impl Reach {
    /// There are `count`.
    #[inline(always)]
    pub(crate) fn of(count: usize) -> Self {
        #[cfg(not(feature = "bounds"))]
        let _ = count;
        Self(
            #[cfg(feature = "bounds")]
            count,
        )
    }

    /// Those below `end` are among them.
    #[inline(always)]
    pub(crate) fn holds(self, end: usize) {
        #[cfg(not(feature = "bounds"))]
        let _ = end;
        #[cfg(feature = "bounds")]
        if end > self.0 {
            beyond(end, self.0);
        }
    }
}

#[cfg(feature = "bounds")]
#[cold]
#[inline(never)]
fn beyond(end: usize, reach: usize) -> ! {
    panic!("a kernel would go to {end}, its pointer reaches to {reach}")
}
