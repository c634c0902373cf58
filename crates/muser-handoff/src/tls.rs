//! TLS 1.3 with raw Ed25519 public keys (RFC 7250), pinned on both sides: no names, no dates, nobody who certifies.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{
    CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig,
    SignatureScheme,
};

use crate::NodeError;
use crate::ids::NodeKey;
use crate::secret::Secret;

/// What nodes that know each other speak.
pub const ALPN: &[u8] = b"muser-node/1";
/// What a node speaks that wants to be known.
pub const ENROL_ALPN: &[u8] = b"muser-node-enrol/1";

/// An Ed25519 key as TLS carries it.
const SPKI_HEAD: [u8; 12] = [0x30, 0x2a, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 0x21, 0];

/// Which keys are taken.
pub(crate) type Trusts = Arc<dyn Fn(&NodeKey) -> bool + Send + Sync>;

struct Pinned {
    trusts: Trusts,
    provider: Arc<CryptoProvider>,
}

impl std::fmt::Debug for Pinned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pinned")
    }
}

/// The key that a peer has shown.
pub(crate) fn key_of(certificate: &CertificateDer<'_>) -> Option<NodeKey> {
    let key = certificate.as_ref().strip_prefix(&SPKI_HEAD)?;
    key.try_into().ok().map(NodeKey)
}

impl Pinned {
    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        match key_of(certificate) {
            Some(key) if (self.trusts)(&key) => Ok(()),
            Some(_) => Err(CertificateError::ApplicationVerificationFailure.into()),
            None => Err(CertificateError::BadEncoding.into()),
        }
    }

    fn signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(certificate.as_ref());
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature_with_raw_key(message, &key, signature, algorithms)
    }
}

/// TLS 1.2 is never agreed on.
fn only_tls13() -> Error {
    Error::PeerIncompatible(rustls::PeerIncompatible::ServerDoesNotSupportTls12Or13)
}

/// What both traits ask alike: Ed25519 by raw keys, in TLS 1.3.
macro_rules! raw_keys {
    () => {
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(only_tls13())
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.signature(message, certificate, signature)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ED25519]
        }

        fn requires_raw_public_keys(&self) -> bool {
            true
        }
    };
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(end_entity).map(|()| ServerCertVerified::assertion())
    }

    raw_keys!();
}

impl ClientCertVerifier for Pinned {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(end_entity).map(|()| ClientCertVerified::assertion())
    }

    raw_keys!();
}

fn certified(secret: &Secret, provider: &CryptoProvider) -> Result<Arc<CertifiedKey>, NodeError> {
    let failed = |error: Error| NodeError::System(format!("the node's key cannot be used with TLS: {error}"));
    let private = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(&secret.pkcs8()[..])).clone_key();
    let signing = provider.key_provider.load_private_key(private).map_err(failed)?;
    let public = [&SPKI_HEAD[..], &secret.key().0].concat();
    Ok(Arc::new(CertifiedKey::new(vec![CertificateDer::from(public)], signing)))
}

/// For the side that dials.
pub(crate) fn client(secret: &Secret, trusts: Trusts, alpn: &[u8]) -> Result<ClientConfig, NodeError> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let resolver = rustls::client::AlwaysResolvesClientRawPublicKeys::new(certified(secret, &provider)?);
    let mut config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| NodeError::System(error.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Pinned { trusts, provider }))
        .with_client_cert_resolver(Arc::new(resolver));
    config.alpn_protocols = vec![alpn.to_vec()];
    config.enable_sni = false;
    // Each connection proves its key anew: one that was removed must not come back by a ticket.
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
}

/// For the side that is dialled.
pub(crate) fn server(secret: &Secret, trusts: Trusts, alpn: &[u8]) -> Result<ServerConfig, NodeError> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let resolver = rustls::server::AlwaysResolvesServerRawPublicKeys::new(certified(secret, &provider)?);
    let mut config = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| NodeError::System(error.to_string()))?
        .with_client_cert_verifier(Arc::new(Pinned { trusts, provider }))
        .with_cert_resolver(Arc::new(resolver));
    config.alpn_protocols = vec![alpn.to_vec()];
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Why a handshake came to nothing, as a word for counters.
pub(crate) fn handshake_fault(error: &std::io::Error) -> &'static str {
    use rustls::AlertDescription as Alert;
    match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(
            Error::InvalidCertificate(_)
            | Error::AlertReceived(Alert::AccessDenied | Alert::BadCertificate | Alert::CertificateUnknown),
        ) => "key",
        Some(
            Error::NoCertificatesPresented
            | Error::NoApplicationProtocol
            | Error::AlertReceived(Alert::NoApplicationProtocol),
        ) => "protocol",
        Some(Error::PeerIncompatible(_) | Error::AlertReceived(Alert::ProtocolVersion)) => "version",
        Some(Error::InvalidMessage(_) | Error::InappropriateMessage { .. }) => "not_tls",
        Some(_) => "tls",
        None => "broken",
    }
}
