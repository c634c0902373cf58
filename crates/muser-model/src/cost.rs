//! The arithmetic of one token: what a model file weighs, what a decoded token reads and computes, what a sequence keeps.
//!
//! Nothing is measured here and nothing is estimated: all figures follow from the tensor table and the geometry, so they
//! can be had from a header alone. Decoding reads every weight once but the embedding table, of which it reads one row.
//! The work of norms, rotation and activation functions (well under one per cent) is not counted in FLOPs.

mod picture;

use muser_gguf::{GgmlType, GgufFile};

use crate::Geometry;

pub use picture::PictureCost;

/// Positions of one KV block; sequences take whole blocks. `muser-backend` does not compile unless `muser-kv` has the same.
pub const KV_BLOCK: u64 = 256;

/// For which use costs are asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CostOptions {
    /// Positions of one sequence.
    pub context: u64,
    /// Sequences at the same time.
    pub slots: u64,
    /// Type of the values in the KV cache.
    pub kv_type: GgmlType,
    /// Positions that a sliding layer keeps beyond its window, for rows that are in flight (drafts, chunks).
    pub window_slack: u64,
}

impl Default for CostOptions {
    fn default() -> CostOptions {
        CostOptions { context: 4096, slots: 1, kv_type: GgmlType::F16, window_slack: 0 }
    }
}

/// A part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The embedding table.
    Embedding,
    /// Attention matrices of all layers.
    Attention,
    /// Feed-forward matrices of all layers.
    FeedForward,
    /// Norm vectors and factors of all layers.
    Norms,
    /// The vocabulary matrix.
    Output,
    /// Tensors that the text model does not use.
    Other,
}

impl Part {
    /// Name for tables.
    pub fn name(self) -> &'static str {
        match self {
            Part::Embedding => "embedding",
            Part::Attention => "attention",
            Part::FeedForward => "feed-forward",
            Part::Norms => "norms",
            Part::Output => "output",
            Part::Other => "other",
        }
    }

    /// Is all of it read for every decoded token?
    pub fn is_streamed(self) -> bool {
        !matches!(self, Part::Embedding | Part::Other)
    }

    fn of(name: &str) -> Part {
        let within = match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((_, within)) => within,
            None if name.starts_with("token_embd.") => return Part::Embedding,
            None if name == "output.weight" => return Part::Output,
            None if name == "output_norm.weight" || is_factor(name) && name.starts_with("output.") => {
                return Part::Norms;
            }
            None => return Part::Other,
        };
        match within {
            "attn_q.weight" | "attn_k.weight" | "attn_v.weight" | "attn_gate.weight"
            | "attn_output.weight" => Part::Attention,
            "ffn_gate.weight" | "ffn_up.weight" | "ffn_down.weight" => Part::FeedForward,
            "attn_norm.weight"
            | "attn_q_norm.weight"
            | "attn_k_norm.weight"
            | "post_attention_norm.weight"
            | "ffn_norm.weight"
            | "post_ffw_norm.weight" => Part::Norms,
            _ if is_factor(within) => Part::Norms,
            _ => Part::Other,
        }
    }
}

/// One number beside a matrix.
fn is_factor(name: &str) -> bool {
    name.rsplit_once('.').is_some_and(|(_, last)| last == "scale")
}

/// Tensors of one part and one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Part of the model.
    pub part: Part,
    /// Block type.
    pub ty: GgmlType,
    /// Tensors.
    pub tensors: u64,
    /// Values.
    pub parameters: u64,
    /// Bytes in the file, without padding.
    pub bytes: u64,
}

/// What the KV cache takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvCost {
    /// Layers that see everything.
    pub full_layers: u64,
    /// Layers that see a window.
    pub sliding_layers: u64,
    /// Bytes of key and value of one position in one layer.
    pub row_bytes: u64,
    /// Bytes that one more position takes while the window is not full.
    pub bytes_per_position: u64,
    /// Bytes that one more position takes when it is: full layers only.
    pub bytes_per_position_beyond_window: u64,
    /// Bytes of the full layers of one sequence at the asked context.
    pub full_bytes: u64,
    /// Bytes of the sliding layers of one sequence at the asked context.
    pub sliding_bytes: u64,
    /// The same for one sequence in whole blocks of 256 positions, which is what is taken from memory; a window that
    /// does not begin at a block needs one block more.
    pub slot_block_bytes: u64,
}

impl KvCost {
    /// Bytes of one sequence at the asked context.
    pub fn slot_bytes(&self) -> u64 {
        self.full_bytes + self.sliding_bytes
    }
}

/// All figures; see the module text for what is counted.
#[derive(Clone, Debug, PartialEq)]
pub struct Cost {
    /// What was asked.
    pub options: CostOptions,
    /// Tensors by part and type, in that order.
    pub shares: Vec<Share>,
    /// All values of all tensors.
    pub parameters: u64,
    /// Bytes of all tensors, without padding.
    pub tensor_bytes: u64,
    /// Bytes of the weights that every decoded token reads.
    pub streamed_bytes: u64,
    /// Floating-point operations of all matrices for one token; a multiply-add counts as two.
    pub matrix_flops: u64,
    /// Those of the attention of one token at the asked context.
    pub attention_flops: u64,
    /// The KV cache.
    pub kv: KvCost,
}

impl Cost {
    /// Costs of an open file.
    pub fn of_file(file: &GgufFile, geometry: &Geometry, options: CostOptions) -> Cost {
        let table =
            file.tensors().iter().map(|tensor| (tensor.name.as_str(), tensor.dims.as_slice(), tensor.ty));
        Cost::of_table(table, geometry, options)
    }

    /// Costs of a tensor table: name, dimensions, type. Figures saturate instead of wrapping.
    pub fn of_table<'a>(
        table: impl IntoIterator<Item = (&'a str, &'a [u64], GgmlType)>,
        geometry: &Geometry,
        options: CostOptions,
    ) -> Cost {
        let mut shares: Vec<Share> = Vec::new();
        for (name, dims, ty) in table {
            let part = Part::of(name);
            let parameters = dims.iter().fold(1_u64, |product, dim| product.saturating_mul(*dim));
            let bytes = (parameters / ty.block_len() as u64).saturating_mul(ty.block_bytes() as u64);
            match shares.iter_mut().find(|share| (share.part, share.ty) == (part, ty)) {
                Some(share) => {
                    share.tensors += 1;
                    share.parameters = share.parameters.saturating_add(parameters);
                    share.bytes = share.bytes.saturating_add(bytes);
                }
                None => shares.push(Share { part, ty, tensors: 1, parameters, bytes }),
            }
        }
        shares.sort_by_key(|share| (share.part, share.ty));
        let sum = |value: fn(&Share) -> u64, parts: fn(Part) -> bool| -> u64 {
            shares
                .iter()
                .filter(|share| parts(share.part))
                .fold(0, |sum, share| sum.saturating_add(value(share)))
        };
        let matrices = |part| matches!(part, Part::Attention | Part::FeedForward | Part::Output);
        Cost {
            options,
            parameters: sum(|share| share.parameters, |_| true),
            tensor_bytes: sum(|share| share.bytes, |_| true),
            streamed_bytes: sum(|share| share.bytes, Part::is_streamed),
            matrix_flops: sum(|share| share.parameters, matrices).saturating_mul(2),
            attention_flops: attention_flops(geometry, options.context),
            kv: kv_cost(geometry, &options),
            shares,
        }
    }

    /// Bytes of one part, of all types.
    pub fn part_bytes(&self, part: Part) -> u64 {
        self.shares.iter().filter(|share| share.part == part).map(|share| share.bytes).sum()
    }

    /// Values of one part.
    pub fn part_parameters(&self, part: Part) -> u64 {
        self.shares.iter().filter(|share| share.part == part).map(|share| share.parameters).sum()
    }

    /// Tensors and bytes of one type.
    pub fn type_totals(&self, ty: GgmlType) -> (u64, u64) {
        let shares = self.shares.iter().filter(|share| share.ty == ty);
        shares.fold((0, 0), |(tensors, bytes), share| (tensors + share.tensors, bytes + share.bytes))
    }

    /// FLOPs of one decoded token at the asked context.
    pub fn token_flops(&self) -> u64 {
        self.matrix_flops.saturating_add(self.attention_flops)
    }

    /// Bytes that one decoded token reads at the asked context: weights and the keys and values it sees.
    pub fn token_bytes(&self) -> u64 {
        self.streamed_bytes.saturating_add(self.kv.slot_bytes())
    }

    /// FLOPs for each byte read, one sequence at the asked context.
    pub fn flops_per_byte(&self) -> f64 {
        self.token_flops() as f64 / self.token_bytes().max(1) as f64
    }

    /// Memory for all weights and the KV blocks of all slots.
    pub fn memory_bytes(&self) -> u64 {
        self.tensor_bytes.saturating_add(self.kv.slot_block_bytes.saturating_mul(self.options.slots))
    }

    /// How many slots of the asked context fit into this much memory beside the weights.
    pub fn slots_in(&self, memory_bytes: u64) -> u64 {
        memory_bytes.saturating_sub(self.tensor_bytes) / self.kv.slot_block_bytes.max(1)
    }
}

fn layer_counts(geometry: &Geometry) -> (u64, u64) {
    let sliding = geometry.sliding.iter().filter(|sliding| **sliding).count() as u64;
    (geometry.layers() as u64 - sliding, sliding)
}

/// Scores and weighted sum: two multiply-adds for each value of each query head and visible position.
fn attention_flops(geometry: &Geometry, context: u64) -> u64 {
    let (full, sliding) = layer_counts(geometry);
    let windowed = context.min(geometry.window as u64);
    let positions = full.saturating_mul(context).saturating_add(sliding.saturating_mul(windowed));
    positions.saturating_mul(4 * geometry.q_width() as u64)
}

fn kv_cost(geometry: &Geometry, options: &CostOptions) -> KvCost {
    let (full_layers, sliding_layers) = layer_counts(geometry);
    let ty = options.kv_type;
    // Heads are stored one by one, each in whole blocks of the type.
    let head_bytes = (geometry.head_dim as u64).div_ceil(ty.block_len() as u64) * ty.block_bytes() as u64;
    let row_bytes = 2 * geometry.kv_heads as u64 * head_bytes;
    let context = options.context;
    let window = (geometry.window as u64).saturating_add(options.window_slack);
    let whole_blocks = |positions: u64| positions.div_ceil(KV_BLOCK).saturating_mul(KV_BLOCK);
    let full_blocks = whole_blocks(context);
    let sliding_blocks = whole_blocks(context).min(whole_blocks(window).saturating_add(KV_BLOCK));
    let bytes = |full_positions: u64, sliding_positions: u64| {
        let full = full_layers.saturating_mul(full_positions).saturating_mul(row_bytes);
        (full, sliding_layers.saturating_mul(sliding_positions).saturating_mul(row_bytes))
    };
    let (full_bytes, sliding_bytes) = bytes(context, context.min(window));
    let (full_block_bytes, sliding_block_bytes) = bytes(full_blocks, sliding_blocks);
    KvCost {
        full_layers,
        sliding_layers,
        row_bytes,
        bytes_per_position: (full_layers + sliding_layers) * row_bytes,
        bytes_per_position_beyond_window: full_layers * row_bytes,
        full_bytes,
        sliding_bytes,
        slot_block_bytes: full_block_bytes.saturating_add(sliding_block_bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::{self, Mix, Preset, SynthOptions};

    fn released(context: u64) -> Cost {
        let options = SynthOptions::new(Preset::B30, Mix::Medium(GgmlType::Q4_K));
        let table = synth::table(&options).expect("possible");
        let table = table.iter().map(|(name, dims, ty)| (name.as_str(), dims.as_slice(), *ty));
        Cost::of_table(table, &Geometry::released(), CostOptions { context, ..CostOptions::default() })
    }

    #[test]
    fn the_released_model_to_the_byte() {
        let cost = released(131_072);
        assert_eq!(cost.parameters, 27_854_794_240);
        assert_eq!(cost.tensor_bytes, 16_743_567_360);
        assert_eq!(cost.streamed_bytes, 15_987_099_648);
        assert_eq!(cost.part_bytes(Part::Embedding), 756_467_712);
        assert_eq!(cost.part_bytes(Part::Output), 924_571_648);
        assert_eq!(cost.part_bytes(Part::Other), 0);
        assert_eq!(cost.tensor_bytes - cost.streamed_bytes, cost.part_bytes(Part::Embedding));
        // One layer has 483,944,448 parameters, and the two head norms of 128 values that the file adds.
        let layers = cost.part_parameters(Part::Attention) + cost.part_parameters(Part::FeedForward);
        assert_eq!(layers + cost.part_parameters(Part::Norms), 52 * (483_944_448 + 256) + 6656);
        let counts =
            [GgmlType::F32, GgmlType::Q4_K, GgmlType::Q5_K, GgmlType::Q6_K].map(|ty| cost.type_totals(ty).0);
        assert_eq!(counts, [313, 365, 1, 52]);
        assert_eq!(cost.matrix_flops, 2 * (layers + cost.part_parameters(Part::Output)));
    }

    #[test]
    fn the_kv_cache_of_the_released_model() {
        for (context, bytes) in [(131_072, 1_826_619_392), (32_768, 517_996_544), (1, 53_248), (0, 0)] {
            assert_eq!(released(context).kv.slot_bytes(), bytes, "context {context}");
        }
        let kv = released(131_072).kv;
        assert_eq!((kv.full_layers, kv.sliding_layers, kv.row_bytes), (13, 39, 1024));
        assert_eq!((kv.bytes_per_position, kv.bytes_per_position_beyond_window), (53_248, 13_312));
        // 131,072 positions are whole blocks; the window of 8 blocks may lie across 9.
        assert_eq!(kv.slot_block_bytes, (13 * 131_072 + 39 * 2304) * 1024);
        assert_eq!(released(1).kv.slot_block_bytes, 52 * 256 * 1024);
    }

    #[test]
    fn slots_share_weights_and_nothing_else() {
        let cost = released(32_768);
        let two = CostOptions { slots: 2, ..cost.options };
        let two = Cost { options: two, ..cost.clone() };
        assert_eq!(two.memory_bytes() - cost.memory_bytes(), cost.kv.slot_block_bytes);
        assert_eq!(cost.slots_in(two.memory_bytes()), 2);
        assert_eq!(cost.slots_in(two.memory_bytes() - 1), 1);
        assert_eq!(cost.slots_in(0), 0);
    }

    #[test]
    fn decoding_is_bound_by_memory() {
        let cost = released(1);
        assert!((3.0..4.0).contains(&cost.flops_per_byte()), "{}", cost.flops_per_byte());
        // Attention grows with the context, matrices do not: 4 * 4096 for each visible position of each layer.
        let far = released(131_072);
        assert_eq!(far.matrix_flops, cost.matrix_flops);
        assert_eq!(far.attention_flops, 4 * 4096 * (13 * 131_072 + 39 * 2048));
    }

    #[test]
    fn the_sizes_of_both_released_files() {
        // The metadata of the two releases differs in the chat template only, by 2,825 bytes.
        let table =
            synth::table(&SynthOptions::new(Preset::B30, Mix::Medium(GgmlType::Q4_K))).expect("possible");
        let table_bytes: u64 = table
            .iter()
            .map(|(name, dims, _)| 8 + name.len() as u64 + 4 + 8 * dims.len() as u64 + 4 + 8)
            .sum();
        assert_eq!(table_bytes, 43_648);
        let data = released(1).tensor_bytes;
        for (metadata_end, file_bytes) in
            [(13_070_042_u64, 16_756_681_056), (13_070_042 + 2825, 16_756_683_904)]
        {
            assert_eq!((metadata_end + table_bytes).next_multiple_of(32) + data, file_bytes);
        }
    }
}
