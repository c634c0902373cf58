//! Which instruction set the kernels use: detected once, overridable so that one machine tests all its paths.

use muser_backend::ExecError;

/// Name of the environment variable that overrides the choice.
pub const ISA_VARIABLE: &str = "MUSER_CPU";

/// Instruction sets with kernels. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// The same with AVX-VNNI.
    AvxVnni,
    /// AVX-512 F, BW, VL, DQ and VNNI.
    Avx512,
    /// Arm with the dot product extension.
    Neon,
}

impl Isa {
    /// All of them, slowest first.
    pub const ALL: [Self; 5] = [Self::Scalar, Self::Neon, Self::Avx2, Self::AvxVnni, Self::Avx512];

    /// Name as in the environment variable.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::AvxVnni => "avxvnni",
            Self::Avx512 => "avx512",
            Self::Neon => "neon",
        }
    }

    /// Name for people.
    pub fn label(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "AVX2",
            Self::AvxVnni => "AVX-VNNI",
            Self::Avx512 => "AVX-512 VNNI",
            Self::Neon => "NEON dot product",
        }
    }

    /// Does this processor (and operating system) have it?
    pub fn is_supported(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("bmi2")
            }
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => Self::Avx2.is_supported() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("dotprod"),
            #[allow(unreachable_patterns, reason = "the sets of other architectures")]
            _ => false,
        }
    }

    /// The fastest set that this processor has.
    pub fn detect() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.is_supported()).unwrap_or(Self::Scalar)
    }

    /// The set that [`ISA_VARIABLE`] asks for, else the detected one.
    pub fn from_environment() -> Result<Self, ExecError> {
        match std::env::var_os(ISA_VARIABLE) {
            None => Ok(Self::detect()),
            Some(value) => Self::parse(&value.to_string_lossy()),
        }
    }

    /// The set of this name, if the processor has it.
    pub fn parse(name: &str) -> Result<Self, ExecError> {
        let supported = || {
            let names: Vec<_> =
                Self::ALL.into_iter().filter(|isa| isa.is_supported()).map(Self::name).collect();
            names.join(", ")
        };
        let unsupported = |what| ExecError::Unsupported { backend: "cpu", what };
        let isa = Self::ALL.into_iter().find(|isa| isa.name() == name).ok_or_else(|| {
            unsupported(format!(
                "{ISA_VARIABLE}={name} is not an instruction set, expected one of {}",
                supported()
            ))
        })?;
        if isa.is_supported() {
            Ok(isa)
        } else {
            Err(unsupported(format!(
                "{ISA_VARIABLE}={name}: this processor lacks it, it has {}",
                supported()
            )))
        }
    }
}
