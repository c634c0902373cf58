//! The target `link` of `muser-fuzzing`.
#![no_main]
muser_fuzz::program!(muser_fuzzing::LINK);
