// go run hello.go PORT NAME [MAX_VERSION]: one TLS connection to a loopback port, asking for the name.
package main

import (
	"crypto/tls"
	"log"
	"os"
)

func main() {
	config := &tls.Config{
		ServerName:         os.Args[2],
		NextProtos:         []string{"h2", "http/1.1"},
		InsecureSkipVerify: true, // there is no server: the handshake ends with an alert
	}
	if len(os.Args) > 3 {
		config.MinVersion = tls.VersionTLS10
		versions := map[string]uint16{"1.0": tls.VersionTLS10, "1.1": tls.VersionTLS11, "1.2": tls.VersionTLS12}
		config.MaxVersion = versions[os.Args[3]]
	}
	_, err := tls.Dial("tcp", "127.0.0.1:"+os.Args[1], config)
	log.Fatal(err)
}
