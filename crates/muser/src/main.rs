//! The muser command.

fn main() {}
