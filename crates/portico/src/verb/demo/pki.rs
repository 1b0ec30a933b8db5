//! The demo's own certificate authority: one for the whole site, valid for a month, gone with the demo.

use std::net::IpAddr;

use anyhow::Context;
use jiff::ToSpan;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, SanType, date_time_ymd,
};

/// Signs the certificates of the stand-in API servers, of the tunnel listener and of its clients.
pub(super) struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, in PEM.
pub(super) struct Identity {
    pub(super) certificate: String,
    pub(super) key: String,
}

impl Authority {
    pub(super) fn new() -> anyhow::Result<Self> {
        let mut params = params("portico demo CA", &[])?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().context("making the demo CA's key")?;
        Ok(Self(CertifiedIssuer::self_signed(params, key).context("making the demo CA")?))
    }

    /// The CA's certificate in PEM.
    pub(super) fn certificate(&self) -> String {
        self.0.pem()
    }

    /// A server certificate for `names` and `addresses`.
    pub(super) fn server(&self, names: &[String], addresses: &[IpAddr]) -> anyhow::Result<Identity> {
        let common_name = names.first().map_or("portico demo server", String::as_str);
        let mut params = params(common_name, names)?;
        params.subject_alt_names.extend(addresses.iter().map(|&address| SanType::IpAddress(address)));
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.sign(params)
    }

    /// A client certificate that opens the tunnels of `cluster`.
    pub(super) fn client(&self, cluster: &str) -> anyhow::Result<Identity> {
        let mut params = params("portico demo agent", &[])?;
        params.distinguished_name.push(DnType::OrganizationName, format!("portico:cluster:{cluster}"));
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(params)
    }

    fn sign(&self, params: CertificateParams) -> anyhow::Result<Identity> {
        let key = KeyPair::generate().context("making a key")?;
        let certificate = params.signed_by(&key, &self.0).context("signing a certificate")?;
        Ok(Identity { certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

fn params(common_name: &str, names: &[String]) -> anyhow::Result<CertificateParams> {
    let mut params = CertificateParams::new(names).context("naming a certificate")?;
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.use_authority_key_identifier_extension = true;
    let today = jiff::Zoned::now().date();
    // A day of slack for a clock that is behind; a month for a demo that is left running.
    params.not_before = midnight(today.saturating_sub(1.day()));
    params.not_after = midnight(today.saturating_add(30.days()));
    Ok(params)
}

fn midnight(date: jiff::civil::Date) -> time::OffsetDateTime {
    let part = |number: i8| u8::try_from(number).unwrap_or(1);
    date_time_ymd(i32::from(date.year()), part(date.month()), part(date.day()))
}
