//! The arithmetic of one picture.

use crate::{Geometry, VisionConfig};

use super::{Cost, Part};

/// What a picture costs before a text model has read it, and then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PictureCost {
    /// Rows that the text model gets.
    pub tokens: u64,
    /// Rows of the tower.
    pub patches: u64,
    /// Floating-point operations of the tower's and the adapter's matrices; a multiply-add counts as two.
    pub matrix_flops: u64,
    /// Those of the tower's attention.
    pub attention_flops: u64,
    /// Bytes of the rows that come out, as they are kept.
    pub row_bytes: u64,
    /// Matrix work of the text model for as many tokens.
    pub text_flops: u64,
}

impl PictureCost {
    /// Of a picture of so many rows and columns of tokens. `adapter`: the width between its layers.
    pub fn of(
        config: &VisionConfig,
        adapter: usize,
        (rows, cols): (u32, u32),
        text: &Cost,
        geometry: &Geometry,
    ) -> Self {
        let [hidden, ffn, layers, side] =
            [config.hidden, config.ffn, config.layers, config.grid()].map(|x| x as u64);
        let [merge, adapter, merged] = [config.merge, adapter, config.merged()].map(|x| x as u64);
        let (height, width) = (u64::from(rows) * merge, u64::from(cols) * merge);
        let (patches, tokens) = (height * width, u64::from(rows) * u64::from(cols));
        let of_patch =
            config.patch_values() as u64 * hidden + layers * (4 * hidden * hidden + 2 * hidden * ffn);
        let of_token = merged * adapter + adapter * adapter + adapter * config.projection as u64;
        // Windows are squares, cut at the picture's ends: the squares of their patches are a product of sums over both sides.
        let squares = |len: u64| len / side * side * side + (len % side).pow(2);
        let full = (0..config.layers).filter(|layer| config.is_full(*layer)).count() as u64;
        let pairs = full * patches * patches + (layers - full) * squares(height) * squares(width);
        let text_matrices = text.part_parameters(Part::Attention) + text.part_parameters(Part::FeedForward);
        Self {
            tokens,
            patches,
            matrix_flops: 2 * (patches * of_patch + tokens * of_token),
            attention_flops: 4 * hidden * pairs,
            row_bytes: tokens * 4 * geometry.hidden as u64,
            text_flops: (2 * text_matrices).saturating_mul(tokens),
        }
    }
}

#[cfg(test)]
mod tests {
    use muser_gguf::GgmlType;

    use super::*;
    use crate::cost::CostOptions;
    use crate::synth::{self, Mix, Preset, SynthOptions};

    /// Figures worked out by hand from the released geometry.
    #[test]
    fn pictures_of_the_released_model() {
        let table = synth::table(&SynthOptions::new(Preset::B30, Mix::Medium(GgmlType::Q4_K))).expect("made");
        let table = table.iter().map(|(name, dims, ty)| (name.as_str(), dims.as_slice(), *ty));
        let g = Geometry::released();
        let text = Cost::of_table(table, &g, CostOptions::default());
        let of = |grid| PictureCost::of(&VisionConfig::released(), 4096, grid, &text, &g);
        let tera = |flops: u64| flops as f64 / 1e12;
        for (grid, tokens, tower, text_work, row_bytes) in [
            ((8, 8), 64, 0.98, 3.3, 1_703_936),
            ((32, 32), 1024, 17.6, 52.3, 27_262_976),
            ((39, 69), 2691, 51.6, 137.0, 71_645_184),
            ((64, 64), 4096, 86.4, 209.0, 109_051_904),
        ] {
            let cost = of(grid);
            assert_eq!((cost.tokens, cost.patches, cost.row_bytes), (tokens, 4 * tokens, row_bytes));
            let all = tera(cost.matrix_flops + cost.attention_flops);
            assert!((all / tower - 1.0).abs() < 0.02, "{grid:?}: {all} TFLOP");
            assert!((tera(cost.text_flops) / text_work - 1.0).abs() < 0.05, "{}", tera(cost.text_flops));
        }
        // One window of 64 x 64 patches, 13 full layers: the whole attention is as if all layers were full.
        assert_eq!(of((16, 16)).attention_flops, 4 * 1536 * 50 * 1024 * 1024);
    }
}
