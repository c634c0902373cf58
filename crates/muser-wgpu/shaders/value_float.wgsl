fn value_at(row: u32, e: u32) -> f32 { return float_weight(row, e); }
