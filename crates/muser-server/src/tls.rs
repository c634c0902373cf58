//! The certificate and its key: read at start, and again when the operator says that they have changed.

use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

use crate::config::ServerConfig;
use crate::error::ServerError;

/// What TLS connections are accepted with now; nothing if the server speaks plainly.
#[derive(Clone)]
pub(crate) struct Tls(Option<Arc<RwLock<TlsAcceptor>>>);

impl Tls {
    /// From the configuration's files.
    pub(crate) fn load(config: &ServerConfig) -> Result<Self, ServerError> {
        Ok(Self(acceptor(config)?.map(|acceptor| Arc::new(RwLock::new(acceptor)))))
    }

    /// Reads the files again; what is there stays in use if they cannot be used. Connections that are open are not touched.
    pub(crate) fn reload(&self, config: &ServerConfig) -> Result<(), ServerError> {
        if let (Some(current), Some(fresh)) = (&self.0, acceptor(config)?) {
            *current.write().unwrap_or_else(PoisonError::into_inner) = fresh;
        }
        Ok(())
    }

    /// For the next connection.
    pub(crate) fn current(&self) -> Option<TlsAcceptor> {
        self.0.as_ref().map(|current| current.read().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

fn acceptor(config: &ServerConfig) -> Result<Option<TlsAcceptor>, ServerError> {
    let (Some(certificate), Some(key)) = (&config.tls_certificate, &config.tls_key) else { return Ok(None) };
    let chain = CertificateDer::pem_file_iter(certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| file_fault("TLS certificate", certificate, &error))?;
    if chain.is_empty() {
        return Err(file_fault("TLS certificate", certificate, &"it holds no certificate"));
    }
    let private = private_key(key)?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| file_fault("TLS certificate", certificate, &error))?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .map_err(|error| file_fault("TLS certificate", certificate, &error))?;
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Some(TlsAcceptor::from(Arc::new(tls))))
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, ServerError> {
    let text = std::fs::read_to_string(path).map_err(|error| file_fault("TLS key", path, &error))?;
    let text = zeroize::Zeroizing::new(text);
    crate::config::warn_if_open("TLS key", path);
    if text.contains("ENCRYPTED") {
        return Err(file_fault(
            "TLS key",
            path,
            &"the key is encrypted, and there is nobody here to ask for its passphrase; `openssl pkey -in KEY -out PLAIN` \
              writes it without one",
        ));
    }
    PrivateKeyDer::from_pem_slice(text.as_bytes()).map_err(|error| match error {
        rustls::pki_types::pem::Error::NoItemsFound => {
            file_fault("TLS key", path, &"it holds no private key (PEM)")
        }
        error => file_fault("TLS key", path, &error),
    })
}

fn file_fault(what: &'static str, path: &Path, reason: &dyn std::fmt::Display) -> ServerError {
    ServerError::File { what, path: path.display().to_string(), reason: reason.to_string() }
}
