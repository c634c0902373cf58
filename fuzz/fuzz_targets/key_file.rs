//! The target `key_file` of `muser-fuzzing`.
#![no_main]
muser_fuzz::program!(muser_fuzzing::KEY_FILE);
