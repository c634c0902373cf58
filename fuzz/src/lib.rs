//! What every program of this folder is made of.

/// A program for libFuzzer: the target's function, memory counted.
#[macro_export]
macro_rules! program {
    ($target:path) => {
        #[global_allocator]
        static ALLOCATOR: muser_testkit::CountingAllocator = muser_testkit::CountingAllocator;

        libfuzzer_sys::fuzz_target!(|data: &[u8]| {
            static TARGET: muser_fuzzing::Target = $target;
            muser_fuzzing::fuzz(&TARGET, data);
        });
    };
}
