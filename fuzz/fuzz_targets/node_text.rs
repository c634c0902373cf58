//! The target `node_text` of `muser-fuzzing`.
#![no_main]
muser_fuzz::program!(muser_fuzzing::NODE_TEXT);
