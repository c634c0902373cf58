//! What goes into the file: tensors in order, their types, and where each comes from.

use muser_gguf::{GgmlType, GgufHeader, GgufWriter};

use crate::ConvertError;
use crate::error::wrong;
use crate::safetensors::Dtype;
use crate::source::{Codes, Source};

/// What matrices become.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatrixType {
    /// What they are: NVFP4 and floats stay, FP8 becomes BF16.
    #[default]
    Keep,
    /// BF16, rounded to nearest even.
    Bf16,
    /// 8 bits in blocks of 32.
    Q8_0,
    /// 4-bit floats with a scale for 16; what is NVFP4 already stays as it is.
    Nvfp4,
}

/// Types of the two sorts of matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Types {
    /// Matrices of layers. If it is [`MatrixType::Keep`], those of them that are not NVFP4 go with the rest.
    pub layers: MatrixType,
    /// Embedding table, vocabulary matrix and the like.
    pub rest: MatrixType,
}

/// In which order rows go out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    AsTheyAre,
    /// Within each head of so many rows: of two halves to pairs. Row `2 t + s` is row `t` of half `s`.
    Pairs {
        head: usize,
    },
}

impl Order {
    /// Rows that belong together.
    pub(crate) fn unit(self) -> usize {
        match self {
            Order::AsTheyAre => 1,
            Order::Pairs { head } => head,
        }
    }

    /// Which row of its unit goes to place `row`.
    pub(crate) fn source(self, row: usize) -> usize {
        match self {
            Order::AsTheyAre => row,
            Order::Pairs { head } => row % 2 * (head / 2) + row / 2,
        }
    }

    /// The same with single values.
    pub(crate) fn apply(self, values: &[f32]) -> Vec<f32> {
        let unit = self.unit();
        (0..values.len()).map(|i| values[i / unit * unit + self.source(i % unit)]).collect()
    }
}

/// A tensor of the file.
pub(crate) struct Planned {
    pub(crate) name: String,
    pub(crate) dims: Vec<u64>,
    pub(crate) ty: GgmlType,
    pub(crate) what: What,
}

/// Its values.
pub(crate) enum What {
    Matrix {
        source: Box<Source>,
        order: Order,
    },
    /// Small ones are made with the plan.
    Values(Vec<f32>),
    /// The factor of the matrix before, which is known when all of it was seen.
    FactorOfLast,
}

/// Collects tensors.
pub(crate) struct Plan {
    pub(crate) types: Types,
    pub(crate) tensors: Vec<Planned>,
}

impl Plan {
    pub(crate) fn new(types: Types) -> Plan {
        Plan { types, tensors: Vec::new() }
    }

    /// A matrix of a layer.
    pub(crate) fn layer_matrix(
        &mut self,
        stem: &str,
        source: Source,
        order: Order,
    ) -> Result<(), ConvertError> {
        let is_nvfp4 = matches!(source.codes, Codes::Nvfp4 { .. });
        let wanted = match self.types.layers {
            MatrixType::Keep if !is_nvfp4 => self.types.rest,
            wanted => wanted,
        };
        self.matrix(stem, source, order, wanted)
    }

    /// A matrix outside of the layers.
    pub(crate) fn rest_matrix(&mut self, stem: &str, source: Source) -> Result<(), ConvertError> {
        self.matrix(stem, source, Order::AsTheyAre, self.types.rest)
    }

    fn matrix(
        &mut self,
        stem: &str,
        source: Source,
        order: Order,
        wanted: MatrixType,
    ) -> Result<(), ConvertError> {
        let ty = type_of(&source, wanted);
        if ty.row_bytes(source.cols as usize).is_none() {
            let place = format!("module {}", source.module);
            let expected = format!("a multiple of {} inputs for type {}", ty.block_len(), ty.name());
            return Err(wrong(place, expected, source.cols.to_string()));
        }
        if !source.rows.is_multiple_of(order.unit() as u64) {
            let place = format!("module {}", source.module);
            return Err(wrong(
                place,
                format!("whole heads of {} rows", order.unit()),
                source.rows.to_string(),
            ));
        }
        let factor = match source.codes {
            Codes::Nvfp4 { factor, .. } => What::Values(vec![factor]),
            _ => What::FactorOfLast,
        };
        let input_scale = source.input_scale;
        let dims = vec![source.cols, source.rows];
        self.push(format!("{stem}.weight"), dims, ty, What::Matrix { source: Box::new(source), order });
        if ty == GgmlType::NVFP4 {
            self.push(format!("{stem}.scale"), vec![1], GgmlType::F32, factor);
            if let Some(scale) = input_scale {
                self.values(format!("{stem}.input_scale"), vec![1], vec![scale]);
            }
        }
        Ok(())
    }

    /// Floats that were made already.
    pub(crate) fn values(&mut self, name: String, dims: Vec<u64>, values: Vec<f32>) {
        self.push(name, dims, GgmlType::F32, What::Values(values));
    }

    fn push(&mut self, name: String, dims: Vec<u64>, ty: GgmlType, what: What) {
        self.tensors.push(Planned { name, dims, ty, what });
    }

    /// The figure of `general.file_type`: that of most of the bytes of matrices.
    pub(crate) fn file_type(&self) -> u32 {
        let of = |ty: GgmlType| -> u64 {
            let matrices =
                self.tensors.iter().filter(|t| t.ty == ty && matches!(t.what, What::Matrix { .. }));
            matrices.map(|t| t.dims.iter().product::<u64>()).sum()
        };
        let kinds = [
            (GgmlType::NVFP4, 39),
            (GgmlType::Q8_0, 7),
            (GgmlType::BF16, 32),
            (GgmlType::F16, 1),
            (GgmlType::F32, 0),
        ];
        let most = kinds.iter().max_by_key(|(ty, figure)| (of(*ty), *figure));
        most.map_or(0, |(_, figure)| *figure)
    }

    /// Parameters as people write them: `28B`, `2.6B`, `32M`.
    pub(crate) fn size_label(&self) -> String {
        let values: u64 = self
            .tensors
            .iter()
            .filter(|t| !matches!(t.what, What::FactorOfLast) && !t.name.ends_with("scale"))
            .map(|t| t.dims.iter().product::<u64>())
            .sum();
        let (scaled, unit) = match values {
            1_000_000_000.. => (values as f64 * 1e-9, "B"),
            1_000_000.. => (values as f64 * 1e-6, "M"),
            _ => (values as f64 * 1e-3, "K"),
        };
        if scaled.round() >= 10.0 { format!("{scaled:.0}{unit}") } else { format!("{scaled:.1}{unit}") }
    }

    /// Lays the file out behind the keys of `writer`.
    pub(crate) fn lay_out(&self, mut writer: GgufWriter) -> Result<GgufHeader, ConvertError> {
        for tensor in &self.tensors {
            writer.tensor(&tensor.name, &tensor.dims, tensor.ty)?;
        }
        Ok(writer.finish())
    }
}

fn type_of(source: &Source, wanted: MatrixType) -> GgmlType {
    match (wanted, &source.codes) {
        (MatrixType::Keep, Codes::Floats(entry)) => match entry.dtype {
            Dtype::F32 => GgmlType::F32,
            Dtype::F16 => GgmlType::F16,
            _ => GgmlType::BF16,
        },
        (MatrixType::Keep | MatrixType::Nvfp4, Codes::Nvfp4 { .. }) | (MatrixType::Nvfp4, _) => {
            GgmlType::NVFP4
        }
        (MatrixType::Keep, Codes::Fp8 { .. }) | (MatrixType::Bf16, _) => GgmlType::BF16,
        (MatrixType::Q8_0, _) => GgmlType::Q8_0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_become_pairs() {
        let order = Order::Pairs { head: 6 };
        let rows: Vec<f32> = (0..12u8).map(f32::from).collect();
        assert_eq!(order.apply(&rows), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0, 6.0, 9.0, 7.0, 10.0, 8.0, 11.0]);
        assert_eq!(Order::AsTheyAre.apply(&rows), rows);
    }

    #[test]
    fn sizes_are_named_as_in_the_released_files() {
        let label = |values: u64| {
            let mut plan = Plan::new(Types::default());
            plan.push("a".to_owned(), vec![values], GgmlType::F32, What::Values(Vec::new()));
            plan.size_label()
        };
        assert_eq!(label(27_854_794_240), "28B");
        assert_eq!(label(2_555_900_000), "2.6B");
        assert_eq!(label(1_920_942_592), "1.9B");
        assert_eq!(label(31_500_000), "32M");
        assert_eq!(label(123_456), "123K");
    }
}
